"""The transfer benchmark: its transfers, its detection of missing bytes, and its use of figures."""

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentTypeError
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import transfer_fig12 as fig12
from bench.peers import PeerUnavailable, peer_python
from bench.pictures import Panel, Series, chart
from bench.transfer_figures import (
    MEMCPY,
    OPCODES,
    PEER,
    POINTS,
    SOCKETS,
    SYSTEMS,
    TCP,
    Measured,
    Point,
    aims,
    comparisons,
    draw,
    figures,
)
from bench.transfer_pair import Pair, Sample, System, SystemFailed, uninterrupted
from bench.transfer_raw import CrossMemoryInitiator, CrossMemoryTarget, MemcpyInitiator, SocketsInitiator, SocketsTarget
from bench.transfer_side import READ, WRITE, Memory, Plan, calls_of

ROOT = Path(__file__).resolve().parents[3]
NBYTES = 1 << 20


@given(
    size=st.integers(1, 64), batch=st.integers(1, 8), count=st.integers(1, 20), extra=st.integers(0, 300),
    seed=st.integers(0, 5),
)  # fmt: skip
def test_calls_stay_inside_and_no_block_overwrites_another(size, batch, count, extra, seed):
    span = size * batch + extra
    plan = Plan(WRITE, size, batch, count, seed)
    calls = calls_of(plan, span)
    assert len(calls) == count
    assert all(len(call) == batch for call in calls)
    blocks = {block for call in calls for block in call}
    for side in (0, 1):
        offsets = sorted(block[side] for block in blocks)
        assert all(first + size <= second for first, second in itertools.pairwise(offsets))
        assert offsets[0] >= 0
        assert offsets[-1] + size <= span
    assert calls == calls_of(plan, span)


def test_a_plan_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="does not fit"):
        calls_of(Plan(WRITE, 64, 2, 1), 127)


def test_memory_knows_its_pattern_and_a_single_wrong_byte():
    memory = Memory(3 << 20)
    memory.fill(7, memory.nbytes)
    assert memory.holds(7, 4096, 4096, 2 << 20)
    assert not memory.holds(8, 4096, 4096, 4096)
    memory.view[2 << 20] ^= 1
    assert not memory.holds(7, 4096, 4096, 2 << 20)
    assert memory.holds(7, 4096, 4096, (2 << 20) - 4096)


@pytest.fixture(params=["sockets 1,256", "sockets 4,4096", "process_vm", "memcpy"])
def raw(request):
    """An initiator, and the memories of both sides."""
    ours, theirs = Memory(NBYTES), Memory(NBYTES)
    kind, _, option = request.param.partition(" ")
    if kind == "memcpy":
        initiator = MemcpyInitiator(ours, "", {})
        yield initiator, ours, initiator.other
        return
    target = SocketsTarget(theirs, option) if kind == "sockets" else CrossMemoryTarget(theirs, option)
    make = SocketsInitiator if kind == "sockets" else CrossMemoryInitiator
    initiator = make(ours, option, target.address())
    yield initiator, ours, theirs
    initiator.close()
    target.close()


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize(("size", "batch", "count"), [(4096, 1, 5), (4096, 16, 3), (NBYTES, 1, 1)])
def test_the_limits_move_the_bytes(raw, opcode, size, batch, count):
    initiator, ours, theirs = raw
    plan = Plan(opcode, size, batch, count, seed=3)
    source, destination = (ours, theirs) if opcode == WRITE else (theirs, ours)
    source.fill(11, NBYTES)
    blocks = [block for call in calls_of(plan, NBYTES) for block in call]

    def arrived():
        ranges = [(there, here) if opcode == WRITE else (here, there) for here, there, _ in blocks]
        return [destination.holds(11, to, origin, size) for to, origin in ranges]

    assert not any(arrived())
    for call in calls_of(plan, NBYTES):
        initiator.prepare(opcode, call)()
    assert all(arrived())


def pair_of(system: System, folder: Path) -> contextlib.closing[Pair]:
    return contextlib.closing(Pair(system, Path(sys.executable), NBYTES, folder))


def test_a_pair_of_processes_measures_and_verifies(tmp_path):
    for system in (MEMCPY, SOCKETS[0]):
        with pair_of(system, tmp_path) as pair:
            for seed, opcode in enumerate((WRITE, READ)):
                sample = pair.measure(Plan(opcode, 4096, 4, 5), seed, verify=True)
                assert sample.throughput_gb_s > 0
                assert 0 < sample.p50_us <= sample.p99_us


def test_a_pair_that_does_not_move_the_bytes_is_found_out(tmp_path):
    with pair_of(MEMCPY, tmp_path) as pair:
        plan = Plan(WRITE, 4096, 1, 5)
        pair.measure(plan, 1, verify=True)
        with pair.awake():
            pair._ask("target", do="fill", seed=2, nbytes=NBYTES)
            verify = {"do": "verify", "plan": vars(plan), "seed": 1}
            assert pair._ask("target", calls=5, **verify)["wrong"] == 5
            assert pair._ask("target", calls=2, **verify)["wrong"] == 2


def test_a_system_that_is_slow_makes_fewer_calls(tmp_path):
    with pair_of(MEMCPY, tmp_path) as pair:
        plan = Plan(WRITE, 4096, 1, 100, limit_s=0.0)
        with pair.awake():
            assert pair._ask("initiator", do="run", plan=vars(plan))["calls"] == 1
        assert pair.measure(plan, 3, verify=True).p50_us > 0


def test_a_pair_that_is_not_measured_takes_nobodys_cores(tmp_path):
    with pair_of(SOCKETS[0], tmp_path) as pair:
        pair.measure(Plan(READ, 4096, 1, 5), 1, verify=False)
        for side in pair._sides.values():
            os.waitid(os.P_PID, side._process.pid, os.WSTOPPED | os.WNOWAIT)  # returns once it has stopped
    assert [side._process.returncode for side in pair._sides.values()] == [0, 0]


def test_a_side_that_ends_says_why(tmp_path):
    with (
        pair_of(System("x", "x", "bench.no_such_module", ""), tmp_path) as pair,
        pytest.raises(SystemFailed, match="No module named"),
    ):
        pair.ready()


# --- who ends with whom ---

ANSWER_S = 60


def sides_of(pid: int) -> list[int]:
    """Returns the ids of all descendants of this process."""
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], ANSWER_S)[0])


def test_sides_that_are_stopped_end_with_who_started_them(tmp_path):
    code = (
        "import sys; from pathlib import Path; from bench.transfer_figures import SOCKETS; "
        "from bench.transfer_pair import Pair; "
        "pair = Pair(SOCKETS[0], Path(sys.executable), 1 << 20, Path(sys.argv[1])); pair.ready(); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        sides = [os.pidfd_open(pid) for pid in sides_of(process.pid)]
        process.kill()
    assert len(sides) == 2
    for side in sides:
        assert ended(side)
        os.close(side)


def test_a_side_whose_starter_is_gone_ends_at_once():
    command = [sys.executable, "-m", "bench.transfer_raw", "target", "4096", "1,256", "{}"]
    for parent, said in ((os.getppid(), "the starting process is gone"), (os.getpid(), "")):
        process = subprocess.run([*command, str(parent)], cwd=ROOT, input="", capture_output=True, text=True)
        assert (process.stderr.strip(), bool(process.stdout)) == (said, not said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_must_not_be_broken_off_is_not(number):
    before = signal.getsignal(number)
    with uninterrupted():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("command", [["bench.transfer"], ["bench", "transfer"]])
def test_sigterm_ends_a_benchmark_and_all_that_it_started(tmp_path, command):
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--quick", "--only", "memcpy", "--pictures", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "CC": ""},  # nothing to compile with
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert any("repetitions" in line for line in process.stderr)
        started = [os.pidfd_open(pid) for pid in sides_of(process.pid)]
        process.terminate()
        rest = process.stderr.read()
    assert len(started) == len(command)
    assert process.returncode == (-signal.SIGINT if len(command) == 1 else 128 + signal.SIGTERM)
    assert "KeyboardInterrupt" in rest
    for each in started:
        assert ended(each)
        os.close(each)


def test_a_peer_process_needs_nothing_of_ours():
    """The peer runs in its own environment, without pinyon or third-party packages."""
    modules = "bench.transfer_peer, bench.transfer_nixl, bench.transfer_gloo"
    code = f"import {modules}, sys; sys.exit('pinyon' in sys.modules)"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)


# --- what is made of the figures ---


def _measured(faster: float, systems=SYSTEMS, repetitions: int = 5) -> Measured:
    """Returns measurements in which our systems move ``faster`` times as much, with less latency and CPU to match."""
    measured = Measured()
    for system in SYSTEMS:
        factor = faster if system.name.startswith("pinyon") else 1.0
        if system not in systems:
            measured.missing[system.name] = "not here"
            continue
        for opcode in OPCODES:
            for point in POINTS:
                measured.samples[system.name, opcode, point.name] = [
                    Sample(turn * factor, 50 / factor, 90 / factor, 1 / factor, 1.0)
                    for turn in range(1, repetitions + 1)
                ]
    return measured


@pytest.mark.parametrize(("faster", "met"), [(2.5, True), (0.25, False)])
def test_aims_follow_the_ratios(faster, met):
    found = aims(_measured(faster))
    assert {aim.met for aim in found} == {met}
    assert all(aim.measured in (faster, 1 / faster) for aim in found)
    assert len({aim.name for aim in found}) == len(found)


def test_the_worst_point_decides():
    measured = _measured(2.5)
    slow = Point(1, 16 << 20).name
    measured.samples[TCP.name, READ, slow] = [Sample(1.0, 50, 90, 1, 1.0)] * 5
    unmet = [aim.name for aim in aims(measured) if not aim.met]
    assert "tcp read / Mooncake, 1 MiB and more, least" in unmet
    assert "tcp write / Mooncake, 1 MiB and more, least" not in unmet


def test_without_the_peer_its_aims_are_not_met_and_say_why():
    found = aims(_measured(2.5, systems=[system for system in SYSTEMS if system != PEER]))
    about_it = [aim for aim in found if "Mooncake" in aim.name]
    assert about_it
    assert all(aim.measured is None and not aim.met and aim.reason == "mooncake: not here" for aim in about_it)
    assert all(aim.met for aim in found if aim not in about_it)


def test_ratios_are_within_a_repetition():
    measured = _measured(3.0)
    ratio = comparisons(measured)["tcp_to_mooncake_throughput"][WRITE]["4KiB"]
    assert ratio == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert figures(measured, [TCP])[TCP.name][WRITE]["4KiB"]["throughput_gb_s"]["max"] == 15.0


def test_the_best_plain_sockets_count():
    measured = _measured(1.0)
    point = POINTS[2]
    measured.samples[SOCKETS[1].name, WRITE, point.name] = [Sample(100.0, 1, 1, 1, 1.0)] * 5
    assert measured.best_sockets(WRITE, point) == SOCKETS[1]
    assert measured.best_sockets(READ, point) == SOCKETS[0]


@pytest.mark.parametrize("point", [point for point in POINTS if point.nbytes >= 1 << 20], ids=lambda point: point.name)
@pytest.mark.parametrize("sockets", SOCKETS, ids=lambda sockets: sockets.name)
def test_faster_plain_sockets_at_any_large_point_decide(sockets, point):
    measured = _measured(2.0)
    name = "tcp write, checksum off / best plain sockets, 1 MiB and more, also in batches, least"
    assert {aim.measured for aim in aims(measured) if aim.name == name} == {2.0}
    measured.samples[sockets.name, WRITE, point.name] = [Sample(turn * 4.0, 1, 1, 1, 1.0) for turn in range(1, 6)]
    assert {aim.measured for aim in aims(measured) if aim.name == name} == {0.5}
    del measured.samples[sockets.name, WRITE, point.name]  # the best system is unknown
    assert {aim.measured for aim in aims(measured) if aim.name == name} == {None}


# --- Fig. 12 ---


class Moving:
    """A stand-in for a pair: its rates one after another, each sample in one second of its clock."""

    def __init__(self, rates: list[float], order: list[float], share: float = 1.0) -> None:
        self.rates, self.order, self.share, self.plans, self.closed = iter(rates), order, share, [], False

    def measure(self, plan, seed: int, verify: bool) -> Sample:
        rate = next(self.rates, None)
        if rate is None:
            raise SystemFailed("gone")
        self.order.append(rate)
        self.plans.append(plan)
        return Sample(rate, 1.0, 1.0, 1.0, plan.nbytes / 1e9 * self.share)

    def close(self) -> None:
        self.closed = True


def _fig12(pairs, opcode, until: float = 9.0, order: list[float] | None = None) -> fig12.Measured:
    measured = fig12.Measured([1.0])
    fig12._measure(pairs, measured, opcode, 1.0, until, 1, lambda: float(len(order or [])))
    return measured


def test_fig12_systems_take_turns_and_ratios_are_per_repetition():
    order: list[float] = []
    pairs = {TCP: Moving([2, 4, 6], order), **{sockets: Moving([1, 1, 9], order) for sockets in SOCKETS}}
    pairs[SOCKETS[1]] = Moving([5, 5, 5], order)
    measured = _fig12(pairs, READ, order=order, until=21.0)
    assert order == [2, 1, 5, 1, 1, 1, 1, 5, 1, 1, 1, 1, 4, 1, 9, 9, 9, 6, 9, 5, 9]  # another is first each time
    assert all(plan.nbytes >= 1e9 for pair in pairs.values() for plan in pair.plans)
    assert measured.best_sockets(READ, 1.0) == SOCKETS[1]
    assert measured.ratio(TCP, SOCKETS[0], READ, 1.0) == 2.0  # of 2/1, 4/1 and 6/9
    assert fig12._aim(measured, None, READ).measured == 0.8
    assert fig12._aim(measured, fig12.GLOO, READ).reason == "not measured"
    del measured.samples[SOCKETS[5], READ, 1.0]
    assert fig12._aim(measured, None, READ).measured is None


@pytest.mark.parametrize(("until", "repetitions"), [(0.0, 1), (3.9, 1), (4.0, 2), (5.9, 2), (6.0, 3), (99.0, 3)])
def test_fig12_repeats_what_ends_in_time(until, repetitions):
    order: list[float] = []
    pairs = {TCP: Moving([2, 2, 2], order), PEER: Moving([1, 1, 1], order)}
    assert len(_fig12(pairs, WRITE, until, order).rates(TCP, WRITE, 1.0)) == repetitions


@pytest.mark.parametrize(
    ("fails", "said"), [(Moving([1], []), "gone"), (Moving([1, 1, 1], [], share=0.5), "moved 0.5 GB in 10 s")]
)
def test_fig12_goes_on_without_systems_that_fail_or_fall_short(fails, said):
    pairs = {TCP: Moving([2, 2, 2], []), PEER: fails}
    measured = _fig12(pairs, WRITE)
    assert fails.closed
    assert list(pairs) == [TCP]
    assert measured.missing == {PEER.name: f"write 1 GB: {said}"}
    assert measured.rates(TCP, WRITE, 1.0) == [2, 2, 2]
    assert measured.rates(PEER, WRITE, 1.0) == ([1] if said == "gone" else [])


@given(text=st.one_of(st.floats().map(str), st.floats(0, 200).map(str), st.text()))
def test_fig12_sizes_have_bounds(text):
    try:
        assert 0.1 <= fig12.gigabytes(text) <= 100
    except ArgumentTypeError:
        with contextlib.suppress(ValueError):
            assert not 0.1 <= float(text) <= 100


# --- pictures and peers ---

_value = st.floats(1e-4, 1e6)
_cell = st.none() | st.lists(_value, min_size=3, max_size=3).map(lambda three: tuple(sorted(three)))


@given(cells=st.lists(_cell, min_size=1, max_size=5).filter(any), joined=st.booleans(), panels=st.integers(1, 4))
def test_a_chart_is_xml_and_its_dots_lie_inside(cells, joined, panels):
    panel = Panel("a < b", [str(index) for index in range(len(cells))], [Series("x & y", 9, cells)])
    root = ElementTree.fromstring(chart("t", "GB/s", [panel] * panels, joined=joined))
    width, height = (float(text) for text in root.attrib["viewBox"].split()[2:])
    dots = [node for node in root.iter("{http://www.w3.org/2000/svg}circle") if "." in node.attrib["cx"]]
    assert len(dots) == panels * sum(cell is not None for cell in cells)
    assert all(0 < float(dot.attrib["cx"]) < width and 0 < float(dot.attrib["cy"]) < height for dot in dots)


def test_an_empty_chart_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        chart("t", "s", [Panel("p", ["a"], [Series("x", 0, [None])])], joined=True)


def test_all_pictures_are_drawn(tmp_path):
    draw(_measured(2.0), tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {
        "transfer-throughput", "transfer-latency", "transfer-batches", "transfer-cpu",
    }  # fmt: skip


def test_a_peer_that_does_not_load_is_unavailable(tmp_path):
    folder = tmp_path / "peer-1.0" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    (folder.parent / ".complete").touch()
    with pytest.raises(PeerUnavailable, match=r"does not load \(it needs luck\): .*no_such_peer"):
        peer_python("peer==1.0", "no_such_peer", "it needs luck", tmp_path)
    assert peer_python("peer==1.0", "json", home=tmp_path) == folder / "python"
