"""The path board: a state machine against plain records, and simulated networks in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.transfer.paths import board as boards
from pinyon.transfer.paths.board import PathBoard
from pinyon.transfer.types.nic import Path, Tiers
from tests.long import usually

MIB = 1 << 20
STALL_S = 2.0


def tier(transport: str, *pairs: str) -> tuple[Path, ...]:
    return tuple(Path(transport, *pair.split("-")) for pair in pairs)


def board(seed: int = 1) -> PathBoard:
    return PathBoard(random.Random(seed))


class NoChance(random.Random):
    """Chance that shortens no pause."""

    def random(self) -> float:
        return 0.0


# ---------------------------------------------------------------- the records


@dataclass
class Chain:
    path: Path
    nbytes: int
    began: float
    echo: bool = False
    """True if it was in flight when its path failed."""


class Known:
    """The model's knowledge of one path."""

    def __init__(self) -> None:
        self.avoided = False
        self.failures = 0
        self.pauses = 0  # counted failures since the last completed chain: the exponent of the next pause
        self.ends = 0.0
        self.probing = False
        self.probe_echo = False


class BoardModel(RuleBasedStateMachine):
    TIERS: Tiers = (
        tier("shm", "-"),
        tier("rdma", "m0-m0", "m1-m1"),
        tier("rdma", "m2-m2", "m0-m2", "m2-m0"),
        tier("tcp", "e0-e0", "e1-e1"),
    )
    PATHS = tuple(path for one in TIERS for path in one)
    NICS = ("m0", "m1", "m2", "e0", "e1")

    def __init__(self) -> None:
        super().__init__()
        self.board = PathBoard(random.Random(7))
        self.now = 0.0
        self.known = {path: Known() for path in self.PATHS}
        self.down: set[str] = set()
        self.chains: list[Chain] = []

    def tick(self) -> None:
        """Advances the clock, so that "in flight at the same time" has one meaning."""
        self.now += 1 / 32  # the first pause takes some three of these; sums of them are exact

    def usable(self, path: Path) -> bool:
        return not self.known[path].avoided and path.local_nic not in self.down

    def outage(self, path: Path) -> None:
        for chain in self.chains:
            chain.echo |= chain.path == path
        self.known[path].probe_echo = True

    def check_pause(self, path: Path, ends: float) -> None:
        """Checks the pause after a failure that counts."""
        known = self.known[path]
        longest = min(boards.PAUSE_MAX_S, boards.PAUSE_MIN_S * boards.PAUSE_GROWTH**known.pauses)
        assert longest * (1 - boards.PAUSE_JITTER) - 1e-6 <= ends - self.now <= longest + 1e-6
        known.avoided = True
        known.failures += 1
        known.pauses += 1
        known.ends = ends
        self.outage(path)

    @rule(nbytes=st.sampled_from([4096, MIB, 8 * MIB]), first_tier=st.integers(0, 3), insist=st.booleans())
    def start(self, nbytes: int, first_tier: int, insist: bool) -> None:
        self.tick()
        tiers = self.TIERS[first_tier:]
        if insist:
            path = self.board.choose_any(tiers, nbytes, self.now)
        else:
            path = self.board.choose(tiers, nbytes)
        usable = [[one for one in group if self.usable(one)] for group in tiers]
        if any(usable):
            assert path is not None
            assert self.usable(path)
            assert path in next(group for group in usable if group)
        elif insist:
            left = [one for group in tiers for one in group]
            if not left:
                assert path is None
                return
            assert path in left
            up = [one for one in left if one.local_nic not in self.down]
            assert not up or path in up
            waits = {one: max(self.now, self.known[one].ends) for one in up}
            assert not up or waits[path] == min(waits.values())
        else:
            assert path is None
            return
        self.board.started(path, nbytes)
        self.chains.append(Chain(path, nbytes, self.now))

    def take(self, which: int) -> Chain | None:
        self.tick()
        return self.chains.pop(which % len(self.chains)) if self.chains else None

    @rule(which=st.integers(0, 7))
    def complete(self, which: int) -> None:
        chain = self.take(which)
        if chain is None:
            return
        self.board.completed(chain.path, chain.nbytes, self.now - chain.began, self.now)
        if not chain.echo:
            known = self.known[chain.path]
            known.avoided = False
            known.failures = known.pauses = 0

    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        chain = self.take(which)
        if chain is None:
            return
        self.board.aborted(chain.path, chain.nbytes)

    @rule(which=st.integers(0, 7))
    def fail(self, which: int) -> None:
        chain = self.take(which)
        if chain is None:
            return
        pause = self.board.failed(chain.path, chain.nbytes, self.now - chain.began, self.now)
        known = self.known[chain.path]
        if not chain.echo:
            self.check_pause(chain.path, self.now + pause)
        elif known.avoided:
            assert pause == pytest.approx(max(0.0, known.ends - self.now))
        else:
            assert pause == 0.0

    @rule(most=st.integers(0, 3))
    def probe(self, most: int) -> None:
        self.tick()
        due = self.board.begin_probes(self.now, most)
        expected = [
            path
            for path, known in self.known.items()
            if known.avoided and path.local_nic not in self.down and not known.probing and known.ends <= self.now
        ]
        assert len(set(due)) == len(due) == min(most, len(expected))
        assert set(due) <= set(expected)
        for path in due:
            self.known[path].probing = True
            self.known[path].probe_echo = False

    @rule(which=st.integers(0, 7), works=st.booleans())
    def probe_ends(self, which: int, works: bool) -> None:
        self.tick()
        probed = sorted(one for one, known in self.known.items() if known.probing)
        if not probed:
            return
        path = probed[which % len(probed)]
        known = self.known[path]
        known.probing = False
        if works:
            self.board.recovered(path)
            known.avoided = False
            return
        self.board.probe_failed(path, self.now)
        if known.avoided and not known.probe_echo:
            (state,) = [one for one in self.board.snapshot() if one.path == path]
            self.check_pause(path, state.pause_ends)

    @rule(name=st.sampled_from(NICS))
    def nic_down(self, name: str) -> None:
        self.tick()
        self.board.nic_down(name)
        self.down.add(name)

    @rule(name=st.sampled_from(NICS))
    def nic_up(self, name: str) -> None:
        self.tick()
        remembered = {state.path for state in self.board.snapshot()}
        self.board.nic_up(name, self.now)
        if name in self.down:
            self.down.remove(name)
            for path in remembered:
                if path.local_nic == name:
                    self.known[path].avoided = True
                    self.known[path].ends = self.now
                    self.outage(path)

    @invariant()
    def books_agree(self) -> None:
        states = {state.path: state for state in self.board.snapshot()}
        for path in self.PATHS:
            assert self.board.usable(path) == self.usable(path)
            queued = sum(chain.nbytes for chain in self.chains if chain.path == path)
            if path not in states:
                assert not queued
                continue
            state = states[path]
            assert state.queued_bytes == queued >= 0
            assert state.usable == self.usable(path)
            assert state.failures == self.known[path].failures
            assert state.rate > 0


TestBoardModel = BoardModel.TestCase
TestBoardModel.settings = settings(max_examples=usually(20, long=120), stateful_step_count=50)


# ---------------------------------------------------------------- simulated networks


class Network:
    """Paths that serve up to ``lanes`` chains at once, which share the rate; others wait. Dead paths only stall."""

    def __init__(self, paths: PathBoard, tiers: Tiers, rates: dict[Path, float], lanes: int = 4) -> None:
        self.board = paths
        self.tiers = tiers
        self.rates = rates
        self.lanes = lanes
        self.now = 0.0
        self.dead: set[str] = set()
        self.running: dict[Path, list[list[float]]] = {path: [] for path in rates}  # [bytes left, began, started]
        self.waiting: dict[Path, list[float]] = {path: [] for path in rates}  # the times of their start
        self.probes: dict[Path, float] = {}  # the times of their end
        self.moved = dict.fromkeys(rates, 0)
        self.failures = dict.fromkeys(rates, 0)

    def is_dead(self, path: Path) -> bool:
        return path.local_nic in self.dead

    def submit(self, nbytes: int) -> None:
        path = self.board.choose_any(self.tiers, nbytes, self.now)
        assert path is not None
        self.board.started(path, nbytes)
        self.waiting[path].append(self.now)

    def next_event(self) -> float:
        times = list(self.probes.values())
        for path, chains in self.running.items():
            if self.is_dead(path):
                times += [began + STALL_S for _, began, _ in chains]
            elif chains:
                times.append(self.now + min(left for left, _, _ in chains) * len(chains) / self.rates[path])
        return max(self.now, min(times))

    def step(self, nbytes: int) -> int:
        """Advances to the next event; returns the number of chains that completed."""
        for path, waiting in self.waiting.items():
            while waiting and len(self.running[path]) < self.lanes:
                self.running[path].append([nbytes, self.now, waiting.pop(0)])
        for path in self.board.begin_probes(self.now, 99):
            self.probes[path] = self.now + (0.5 if self.is_dead(path) else 0.001)
        then = self.next_event()
        for path, chains in self.running.items():
            if not self.is_dead(path):
                for chain in chains:
                    chain[0] -= (then - self.now) * self.rates[path] / len(chains)
        self.now = then
        completed = 0
        for path in self.rates:
            chains = self.running[path]
            for chain in [one for one in chains if one[0] < 1e-3]:
                chains.remove(chain)
                self.board.completed(path, nbytes, self.now - chain[1], self.now)
                self.moved[path] += nbytes
                completed += 1
            for chain in [one for one in chains if self.is_dead(path) and one[1] + STALL_S <= self.now]:
                chains.remove(chain)
                self.failures[path] += 1
                self.board.failed(path, nbytes, self.now - chain[2], self.now)
                # As in the engine, chains that wait behind a failed path move to another at once.
                again = 1 + len(self.waiting[path])
                for _ in self.waiting[path]:
                    self.board.aborted(path, nbytes)
                self.waiting[path].clear()
                for _ in range(again):
                    self.submit(nbytes)
        for path in [one for one, ends in self.probes.items() if ends <= self.now]:
            del self.probes[path]
            if self.is_dead(path):
                self.board.probe_failed(path, self.now)
            else:
                self.board.recovered(path)
        return completed

    def run(
        self, chains: int, nbytes: int = MIB, window: int = 32, at: Callable[[int], None] = lambda done: None
    ) -> None:
        """Runs this many chains, ``window`` of them in flight; ``at`` is called with the number that completed."""
        submitted = min(window, chains)
        for _ in range(submitted):
            self.submit(nbytes)
        done = 0
        while done < chains:
            before = done
            done += self.step(nbytes)
            for count in range(before, done):
                at(count)
                if submitted < chains:
                    submitted += 1
                    self.submit(nbytes)
        assert all(state.queued_bytes == 0 for state in self.board.snapshot())

    def share(self, path: Path) -> float:
        return self.moved[path] / sum(self.moved.values())


FOUR = tier("tcp", "e0-f0", "e1-f1", "e2-f2", "e3-f3")


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("window", [16, 64])
def test_a_path_three_times_faster_gets_three_times_the_bytes(lanes: int, window: int) -> None:
    fast, slow = tier("tcp", "e0-f0", "e1-f1")
    network = Network(board(), ((fast, slow),), {fast: 3e9, slow: 1e9}, lanes)
    network.run(2000, window=window)
    assert 2.5 < network.moved[fast] / network.moved[slow] < 3.5


@settings(max_examples=25)
@given(rates=st.lists(st.sampled_from([2e8, 5e8, 1e9, 2e9]), min_size=4, max_size=4), lanes=st.integers(1, 4))
def test_bytes_follow_the_rates_of_four_nics(rates: list[float], lanes: int) -> None:
    network = Network(board(), (FOUR,), dict(zip(FOUR, rates, strict=True)), lanes)
    network.run(1500, window=64)
    for path, rate in zip(FOUR, rates, strict=True):
        assert network.share(path) == pytest.approx(rate / sum(rates), rel=0.3)
    best_possible_s = 1500 * MIB / sum(rates)
    assert network.now < 1.25 * best_possible_s


def test_idle_equal_nics_share() -> None:
    """One chain at a time, so queues do not tell them apart: once the rates are known they take turns."""
    paths = board()
    chosen = []
    for now in range(120):
        path = paths.choose((FOUR,), MIB)
        assert path is not None
        chosen.append(path)
        paths.started(path, MIB)
        paths.completed(path, MIB, MIB / 1e9, float(now))
    assert min(chosen.count(path) for path in FOUR) > 20
    assert [chosen[80:].count(path) for path in FOUR] == [10] * 4


def measured(rates: dict[Path, float]) -> PathBoard:
    """Returns a board that has seen twenty chains per path, one after the other."""
    paths = board()
    for n in range(20):
        for path, rate in rates.items():
            paths.started(path, MIB)
            paths.completed(path, MIB, MIB / rate, float(n))
    return paths


def rate(paths: PathBoard, path: Path) -> float:
    return next(state.rate for state in paths.snapshot() if state.path == path)


def test_a_burst_is_divided_by_measured_rates() -> None:
    """Queues alone would divide the burst evenly, as nothing completes meanwhile."""
    fast, slow = tier("tcp", "e0-f0", "e1-f1")
    paths = measured({fast: 3e9, slow: 1e9})
    chosen = []
    for _ in range(400):
        path = paths.choose(((fast, slow),), MIB)
        assert path is not None
        chosen.append(path)
        paths.started(path, MIB)
    assert chosen.count(fast) == pytest.approx(300, abs=10)


@settings(max_examples=50)
@given(together=st.integers(1, 8), apart_s=st.sampled_from([0.0, 1e-6, 1e-4, 1e-3]), gap_s=st.sampled_from([0.0, 0.5]))
def test_chains_that_share_a_path_measure_its_whole_rate(together: int, apart_s: float, gap_s: float) -> None:
    paths = board()
    now = 0.0
    took_s = 0.032 + apart_s * (together - 1)
    for _ in range(40):
        for _ in range(together):
            paths.started(TCP, 8 * MIB)
        for one in range(together):
            ran_s = 0.032 + apart_s * one
            paths.completed(TCP, 8 * MIB, ran_s, now + ran_s)
        now += took_s + gap_s
    assert rate(paths, TCP) == pytest.approx(together * 8 * MIB / took_s, rel=0.15)


def test_one_odd_sample_does_not_decide() -> None:
    for odd in (1e6, 1e13):
        paths = measured(dict.fromkeys(FOUR, 1e9))
        before = rate(paths, FOUR[0])
        paths.started(FOUR[0], MIB)
        paths.completed(FOUR[0], MIB, MIB / odd, 100.0)
        assert 0.8 * before < rate(paths, FOUR[0]) < 1.7 * before


def test_a_preferred_nic_that_dies_is_avoided_and_returns() -> None:
    preferred, secondary = FOUR[:3], FOUR[3:]
    network = Network(board(), (preferred, secondary), dict.fromkeys(FOUR, 1e9))
    moved_at: dict[int, dict[Path, int]] = {}

    def at(done: int) -> None:
        moved_at[done] = dict(network.moved)
        if done == 1000:
            network.dead.add("e1")
        if done == 40_000:
            network.dead.discard("e1")

    network.run(90_000, window=24, at=at)
    victim = preferred[1]
    assert sum(network.moved.values()) == 90_000 * MIB  # nothing is lost or done twice
    assert network.moved[secondary[0]] == 0
    assert 1 <= network.failures[victim] <= network.lanes  # those in flight and no other: probes are not chains
    assert moved_at[39_999][victim] - moved_at[1100][victim] == 0
    gained = {path: network.moved[path] - moved_at[85_000][path] for path in preferred}
    assert gained[victim] == pytest.approx(sum(gained.values()) / 3, rel=0.2)


def test_secondary_nics_serve_only_while_preferred_ones_are_dead() -> None:
    preferred, secondary = FOUR[:2], FOUR[2:]
    network = Network(board(), (preferred, secondary), dict.fromkeys(FOUR, 1e9))
    network.run(200)
    assert network.moved[secondary[0]] == network.moved[secondary[1]] == 0
    network.dead |= {"e0", "e1"}
    network.run(4000)
    assert network.moved[secondary[0]] == pytest.approx(network.moved[secondary[1]], rel=0.1)
    before = dict(network.moved)
    network.dead.clear()
    network.run(40_000)
    assert network.moved[preferred[0]] > before[preferred[0]]
    settled = dict(network.moved)
    network.run(1000)
    assert [network.moved[path] - settled[path] for path in secondary] == [0, 0]


def test_a_partition_still_tries_each_new_request_and_heals() -> None:
    network = Network(board(), (FOUR,), dict.fromkeys(FOUR, 1e9))
    network.run(100)
    for name in ("e0", "e1", "e2", "e3"):
        network.board.nic_down(name)
    assert network.board.choose((FOUR,), MIB) is None
    assert network.board.choose_any((FOUR,), MIB, network.now) in FOUR
    assert network.board.begin_probes(network.now + 100, 9) == []
    for name in ("e0", "e1", "e2", "e3"):
        network.board.nic_up(name, network.now)
    assert not any(network.board.usable(path) for path in FOUR), "they have to be probed"
    network.run(100)
    assert all(network.board.usable(path) for path in FOUR)


# ---------------------------------------------------------------- transports

RDMA, TCP, SHM, LOCAL = (tier(name, "-")[0] for name in ("rdma", "tcp", "shm", "local"))


@pytest.mark.parametrize(("first_rate", "second_rate"), [(4e9, 1e9), (1e9, 1.1e9), (0.2e9, 10e9)])
def test_a_later_transport_is_unused_while_an_earlier_one_works(first_rate: float, second_rate: float) -> None:
    network = Network(board(), ((RDMA,), (TCP,)), {RDMA: first_rate, TCP: second_rate})
    network.run(20_000)
    assert network.moved[TCP] == 0


def test_a_faster_later_transport_gives_way_to_an_earlier_one() -> None:
    (first,), (later,) = tier("rdma", "m0-m0"), tier("tcp", "e0-e0")
    network = Network(board(), ((first,), (later,)), {first: 1e9, later: 2e9})
    network.run(1000)
    network.dead.add("m0")
    network.run(20_000)
    assert network.moved[later] > 19_000 * MIB
    network.dead.clear()
    network.run(40_000)
    after = dict(network.moved)
    network.run(1000)
    assert network.moved[first] - after[first] == 1000 * MIB


def test_chains_of_any_size_take_the_first_transport() -> None:
    paths = board()
    assert all(paths.choose(((SHM,), (TCP,)), nbytes) == SHM for nbytes in [4096, MIB] * 5_000)
    assert all(paths.choose(((LOCAL,), (TCP,)), MIB) == LOCAL for _ in range(10_000))


# ---------------------------------------------------------------- single decisions


def fail_once(paths: PathBoard, path: Path, now: float) -> float:
    paths.started(path, MIB)
    return paths.failed(path, MIB, 0.0, now)


def test_pauses_double_to_the_longest_and_reset_on_a_transfer() -> None:
    paths = PathBoard(NoChance())
    pauses = [fail_once(paths, TCP, 100.0 * n) for n in range(12)]
    assert pauses == pytest.approx([0.1 * 2**n for n in range(9)] + [30.0] * 3)
    paths.recovered(TCP)
    assert paths.usable(TCP)
    assert fail_once(paths, TCP, 2000.0) == pytest.approx(30.0)  # it answers probes, but moved nothing
    paths.started(TCP, 4096)
    paths.completed(TCP, 4096, 0.1, 2100.0)
    assert paths.usable(TCP)
    assert fail_once(paths, TCP, 2200.0) == pytest.approx(0.1)


def test_if_all_paths_are_avoided_pause_then_queue_decide() -> None:
    paths = PathBoard(NoChance())
    for path, times in zip(FOUR, (3, 2, 1, 4), strict=True):
        for _ in range(times):
            pause = fail_once(paths, path, 0.0)
        assert pause == pytest.approx(0.1 * 2 ** (times - 1))
    assert paths.choose((FOUR,), MIB) is None
    assert paths.choose_any((FOUR,), MIB, 0.0) == FOUR[2]
    assert paths.choose_any((), MIB, 0.0) is None
    paths.started(FOUR[2], MIB)
    assert paths.choose_any((FOUR,), MIB, 0.15) == FOUR[2]
    assert paths.choose_any((FOUR,), MIB, 0.25) == FOUR[1]  # both may be tried; FOUR[2] is being tried
    paths.started(FOUR[1], 2 * MIB)
    assert [paths.choose_any((FOUR,), MIB, 0.25) for _ in range(2)] == [FOUR[2]] * 2
    paths.nic_down("e2")
    assert paths.choose_any((FOUR,), MIB, 0.25) == FOUR[1]


def test_a_nic_that_came_back_is_probed_before_its_pause_ends() -> None:
    paths = board()
    for now in range(8):
        fail_once(paths, FOUR[0], float(now))
    assert paths.begin_probes(10.0, 9) == []
    paths.nic_down("e0")
    assert paths.begin_probes(100.0, 9) == []
    paths.nic_up("e0", 10.0)
    paths.nic_up("e1", 10.0)  # it was not down
    assert paths.begin_probes(10.0, 9) == [FOUR[0]]
    assert paths.begin_probes(10.0, 9) == [], "one at a time"


def test_a_probe_and_a_chain_that_fail_in_one_outage_count_once() -> None:
    paths = PathBoard(NoChance())
    fail_once(paths, TCP, 0.0)
    assert paths.begin_probes(1.0, 9) == [TCP]
    assert fail_once(paths, TCP, 2.0) == pytest.approx(0.2)
    paths.probe_failed(TCP, 3.0)
    assert paths.snapshot()[0].pause_ends == pytest.approx(2.2)
    assert paths.begin_probes(4.0, 9) == [TCP]
    paths.probe_failed(TCP, 5.0)
    assert paths.snapshot()[0].pause_ends == pytest.approx(5.4)


def test_pauses_differ_between_peers() -> None:
    pauses = {fail_once(board(seed), TCP, 0.0) for seed in range(50)}
    assert len(pauses) == 50
    assert all(0.08 <= pause <= 0.1 for pause in pauses)


def test_chains_that_fail_together_count_once() -> None:
    paths = PathBoard(NoChance())
    for _ in range(5):
        paths.started(TCP, MIB)
    assert paths.failed(TCP, MIB, 2.0, 10.0) == pytest.approx(0.1)
    assert [paths.failed(TCP, MIB, 2.0 + late, 10.0 + late) for late in (0.01, 0.02)] == pytest.approx([0.09, 0.08])
    paths.completed(TCP, MIB, 2.5, 10.5)  # its chain was under way when the path failed, so it proves nothing
    assert not paths.usable(TCP)
    paths.recovered(TCP)
    assert paths.failed(TCP, MIB, 4.0, 12.0) == 0.0  # the last echo, after the path came back
    assert paths.usable(TCP)


@pytest.mark.parametrize("end", ["completed", "aborted", "failed"])
def test_a_chain_ends_once(end: str) -> None:
    paths = board()
    clock = () if end == "aborted" else (1.0, 5.0)
    paths.started(TCP, 10)
    getattr(paths, end)(TCP, 10, *clock)
    for path in (TCP, RDMA):
        with pytest.raises(ValueError, match="no such chain"):
            getattr(paths, end)(path, 10, *clock)


def test_a_bounded_number_of_paths_is_remembered(monkeypatch) -> None:
    monkeypatch.setattr(boards, "MAX_PATHS", 10)
    paths = board()
    kept, avoided = tier("tcp", "kept-", "avoided-")
    paths.started(kept, 1)
    fail_once(paths, avoided, 0.0)
    for n in range(100):
        paths.choose((tier("tcp", f"n{n}-", f"o{n}-"),), MIB)
        assert len(paths.snapshot()) <= 10
    assert {kept, avoided} <= {state.path for state in paths.snapshot()}
    for n in range(100):
        paths.started(tier("tcp", f"n{n}-")[0], 1)
    assert len(paths.snapshot()) == 101  # paths that carry chains are never forgotten
    for n in range(100):
        paths.aborted(tier("tcp", f"n{n}-")[0], 1)
