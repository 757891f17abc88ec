"""Transfers by path, source and congestion, with cases worked by hand."""

import random

import pytest

from pinyon.placement.fetch_time import fetch_s, path_kind
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.load_table import PREFILL_US_MAX, whole_us
from pinyon.placement.policy import Fetch, PlacementDecision
from pinyon.placement.transfer_cost import PathKind, TransferCostModel
from tests.unit.placement.conftest import DECODE, LAYOUT, PREFILL, STORE, info, make_fleet, member

GB = 10**9
BLOCK = LAYOUT.block_bytes


@pytest.fixture
def fleet():
    """A fleet of two readers, each on a host with a store, and a reader of unknown host."""
    fleet = make_fleet(("d0", DECODE))
    fleet.join(info("p0", PREFILL, address="a:1"), 0.0)
    fleet.join(info("p1", PREFILL, address="b:1"), 0.0)
    fleet.join(info("s0", STORE, address="a:2"), 0.0)
    fleet.join(info("s1", STORE, address="b:2"), 0.0)
    fleet.join(info("d1", DECODE, address="a:3"), 0.0)
    fleet.join(info("ssd", STORE, address="a:4", on_ssd=True), 0.0)
    return fleet


def on_its_way(fleet, name: str, reader: str, source: str, blocks: int) -> None:
    fetches = (Fetch(member(fleet, source), 0, blocks),)
    decision = PlacementDecision(member(fleet, reader), member(fleet, "d0"), 0, fetches, transfer_s=1.0, prefill_s=1.0)
    fleet.inflight.add(name, decision, 1, 0.0)


def test_kinds_of_paths(fleet):
    p0 = member(fleet, "p0")
    found = {name: path_kind(p0, member(fleet, name)) for name in ("s0", "s1", "d1", "p1", "ssd", "d0")}
    network = PathKind.NETWORK
    assert found == {
        "s0": PathKind.STORE, "s1": network, "d1": PathKind.HOST, "p1": network, "ssd": PathKind.SSD, "d0": network,
    }  # fmt: skip


def test_each_path_of_a_reader_is_learned_by_itself(fleet):
    p0, rng = member(fleet, "p0"), random.Random(1)
    true = {"s0": (1e-4, 20 * GB), "s1": (5e-4, 3 * GB), "d1": (2e-4, 10 * GB), "ssd": (2e-3, GB / 2)}
    for _ in range(400):
        name = rng.choice([*true])
        start_s, bytes_s = true[name]
        size = rng.choice((10**5, 10**6, 10**7, 10**8))
        fleet.learn_transfers(p0, [(size, start_s + size / bytes_s, member(fleet, name))], 0.0)
    for name, (start_s, bytes_s) in true.items():
        for size in (10**6, 10**8):
            assert fetch_s(p0, [(member(fleet, name), size)]) == pytest.approx(start_s + size / bytes_s, rel=0.05)


def test_an_unmeasured_path_is_predicted_by_others_or_its_prior():
    priors = ((1e-3, 1 / (10 * GB)), (1e-3, 1 / GB), (1e-3, 1 / (20 * GB)), (1e-3, 2 / GB))
    model = TransferCostModel(priors)
    assert model.predict_s(GB, PathKind.STORE) == pytest.approx(0.051)
    for size in (10**5, 10**6, 10**7, 10**8) * 20:
        model.observe(size, 3 * (1e-3 + size / GB), PathKind.NETWORK)  # this machine is three times slower
    assert model.predict_s(GB, PathKind.STORE) == pytest.approx(3 * 0.051, rel=0.02)
    model.observe(GB, 0.04, PathKind.STORE)
    assert model.predict_s(GB, PathKind.STORE) == pytest.approx(0.04, rel=0.1)
    assert model.predict_s(GB, PathKind.NETWORK) == pytest.approx(3.003, rel=0.02)


def test_a_path_follows_a_change_of_speed():
    model = TransferCostModel()
    for bytes_s in (GB, 10 * GB, GB / 4):
        for number in range(600):
            size = (10**6, 10**7, 10**8)[number % 3]
            model.observe(size, 1e-3 + size / bytes_s, PathKind.NETWORK)
        assert model.predict_s(10**8) == pytest.approx(1e-3 + 10**8 / bytes_s, rel=0.05)


def test_a_slow_source_is_not_its_readers_fault(fleet):
    """A slow reader is not its sources' fault either."""
    sizes = (10**7, 10**8)
    speeds = {"p0": 4 * GB, "p1": 4 * GB, "d0": GB / 4}
    sources = {"s0": GB / 2, "s1": 4 * GB, "d1": 4 * GB}
    remote = [("p0", "s1"), ("p0", "d0"), ("p1", "s0"), ("p1", "d1"), ("d0", "s1"), ("d0", "s0"), ("p1", "d0")]
    sources["d0"] = 4 * GB
    for number in range(400):
        size = sizes[number % 2]
        for reader, source in remote:
            took_s = size / min(speeds[reader], sources[source])
            fleet.learn_transfers(member(fleet, reader), [(size, took_s, member(fleet, source))], 0.0)
    for reader, source in [*remote, ("d0", "d1")]:
        true_s = 10**8 / min(speeds[reader], sources[source])
        predicted_s = fetch_s(member(fleet, reader), [(member(fleet, source), 10**8)])
        assert predicted_s == pytest.approx(true_s, rel=0.15), (reader, source)


def test_a_read_waits_for_what_its_source_sends_already(fleet):
    p0, s1 = member(fleet, "p0"), member(fleet, "s1")
    alone_s = fetch_s(p0, [(s1, 10 * BLOCK)])
    on_its_way(fleet, "small", "d0", "s1", 4)
    assert fetch_s(p0, [(s1, 10 * BLOCK)]) == pytest.approx(alone_s + 4 * BLOCK / GB)
    on_its_way(fleet, "large", "d1", "s1", 100)  # while ten blocks come, its fetch moves ten as well
    assert fetch_s(p0, [(s1, 10 * BLOCK)]) == pytest.approx(alone_s + 20 * BLOCK / GB)
    assert fetch_s(p0, [(member(fleet, "p1"), 10 * BLOCK)]) == pytest.approx(alone_s), "another source"
    fleet.inflight.begin_prefill("large", member(fleet, "d1"), 1.0)
    assert fetch_s(p0, [(s1, 10 * BLOCK)]) == pytest.approx(alone_s + 4 * BLOCK / GB), "its fetch is over"
    fleet.inflight.release("small")
    assert fetch_s(p0, [(s1, 10 * BLOCK)]) == alone_s


def test_a_read_waits_for_what_comes_to_its_reader_already(fleet):
    p0, p1 = member(fleet, "p0"), member(fleet, "p1")
    alone_s = fetch_s(p0, [(p1, 10 * BLOCK)])
    on_its_way(fleet, "x", "p0", "s1", 6)
    on_its_way(fleet, "y", "p0", "s0", 100)  # the store is on its own host: nothing goes over the network
    assert fetch_s(p0, [(p1, 10 * BLOCK)]) == pytest.approx(alone_s + 6 * BLOCK / GB)
    assert fetch_s(p0, [(member(fleet, "s1"), 10 * BLOCK)]) == pytest.approx(alone_s + 6 * BLOCK / GB), "not twice"


def test_congestion_is_not_taken_for_a_slow_path(fleet):
    """The two readers share the source's adapter and have half each, as predicted."""
    s1 = member(fleet, "s1")
    for number in range(90):
        blocks = (1000, 10_000, 100_000)[number % 3]
        for reader in ("p0", "d0"):
            on_its_way(fleet, f"{number}{reader}", reader, "s1", blocks)
        for reader in ("p0", "d0"):
            size = blocks * BLOCK
            fleet.learn_transfers(member(fleet, reader), [(size, 1e-3 + 2 * size / (4 * GB), s1)], 0.0)
        for reader in ("p0", "d0"):
            fleet.inflight.begin_prefill(f"{number}{reader}", member(fleet, reader), 1.0)
    for blocks in (1000, 100_000):
        true_s = 1e-3 + blocks * BLOCK / (4 * GB)
        assert fetch_s(member(fleet, "p0"), [(s1, blocks * BLOCK)]) == pytest.approx(true_s, rel=0.05)


def test_a_source_that_was_slow_is_not_held_to_be_so_for_ever(fleet):
    p0, slow, other = member(fleet, "p0"), member(fleet, "s1"), member(fleet, "d0")
    size = 100 * BLOCK
    before_s = fetch_s(p0, [(slow, size)])
    fleet.learn_transfers(p0, [(BLOCK, 5.0, slow)], 1.0)  # it stood still when it was asked for one block
    assert fetch_s(p0, [(slow, size)]) > 5 * before_s
    for now_s in range(2, 61):  # it is not asked any more, and the readers learn of others
        fleet.learn_transfers(p0, [(size, before_s, other)], float(now_s))
        fleet.set_load(slow, InstanceLoad(), float(now_s))
    assert fetch_s(p0, [(slow, size)]) > 5 * before_s
    fleet.set_load(slow, InstanceLoad(), 62.0)
    assert fetch_s(p0, [(slow, size)]) == pytest.approx(before_s, rel=0.2)


def test_one_byte_in_an_hour_does_not_take_a_source_out_of_use(fleet):
    p0, s1 = member(fleet, "p0"), member(fleet, "s1")
    fleet.learn_transfers(p0, [(100 * BLOCK, 1e-3 + 100 * BLOCK / GB, member(fleet, "s0"))], 0.0)
    size = 10_000 * BLOCK
    before_s = fetch_s(p0, [(s1, size)])
    fleet.learn_transfers(p0, [(1, 3600.0, s1)], 1.0)
    assert fetch_s(p0, [(s1, size)]) < 20 * before_s


@pytest.mark.parametrize("source", ["s1", "s0", None])
def test_what_cannot_be_teaches_nothing(fleet, source):
    """The report says 1 TB in a microsecond: a broken clock, or a lie."""
    p0, other = member(fleet, "p0"), member(fleet, source) if source else None
    for _ in range(3):
        fleet.learn_transfers(p0, [(10**12, 1e-6, other)], 1.0)
        fleet.learn_transfers(p0, [(10**12, 0.0, other)], 1.0)
    assert p0.transfer_model.samples == 0
    assert all(state.send_rate.per_byte_s == 0.0 for state in fleet.instances())


def test_one_report_hides_a_slow_source_by_half_and_not_for_long(fleet):
    """The report exaggerates as far as possible: a gigabyte in 1.1 ms, 9 TB/s without the start."""
    s1, size = member(fleet, "s1"), 100 * BLOCK
    took_s = 1e-3 + 8 * size / GB  # eight times slower than the paths of all
    for name, source in (("p0", "p1"), ("d0", "p1"), ("d1", "s1")):
        for number in range(20):
            moved = (1, 10)[number % 2] * size
            fleet.learn_transfers(member(fleet, name), [(moved, 1e-3 + moved / GB, member(fleet, source))], 0.0)
    fleet.set_load(s1, InstanceLoad(), 100.0)
    for number in range(50):
        fleet.learn_transfers(member(fleet, ("p0", "d0")[number % 2]), [(size, took_s, s1)], 100.0)
    assert s1.send_rate.per_byte_s == pytest.approx(8 / GB, rel=0.15)
    before = s1.send_rate.per_byte_s
    fleet.learn_transfers(member(fleet, "d1"), [(GB, 1.1e-3, s1)], 100.0)
    assert s1.send_rate.per_byte_s == pytest.approx(before / 2)
    for _ in range(36):  # ln 2 / ln 1.02
        fleet.learn_transfers(member(fleet, "p0"), [(size, took_s, s1)], 100.0)
    assert s1.send_rate.per_byte_s == pytest.approx(before, rel=0.02)


def test_one_report_of_a_source_counts_at_most_twice_the_path(fleet):
    s1, p0 = member(fleet, "s1"), member(fleet, "p0")
    fleet.learn_transfers(p0, [(GB, 1.1e-3, s1)], 1.0)
    assert s1.send_rate.per_byte_s == pytest.approx(1 / (2 * GB))
    on_its_way(fleet, "x", "d0", "s1", 1000)
    path_s = 1e-3 + 1000 * BLOCK / GB
    assert fetch_s(member(fleet, "d1"), [(s1, 1000 * BLOCK)]) == pytest.approx(path_s + 1000 * BLOCK / (2 * GB))


def test_a_read_as_short_as_its_start_shows_no_fast_source(fleet):
    """The read of 65 KB in 1.001 ms, of which 1 ms is the start, does not show 65 GB/s."""
    s1 = member(fleet, "s1")
    for name in ("p0", "d0", "p1") * 10:
        fleet.learn_transfers(member(fleet, name), [(BLOCK, 1.001e-3, s1)], 1.0)
    assert s1.send_rate.per_byte_s > 1 / (4 * GB)


def test_a_source_far_faster_than_the_prior_is_soon_known(fleet):
    s1 = member(fleet, "s1")
    for number in range(12):
        size = (1000, 100_000)[number % 2] * BLOCK
        fleet.learn_transfers(member(fleet, "p0"), [(size, 1e-3 + size / (100 * GB), s1)], 1.0)
    assert s1.send_rate.per_byte_s == pytest.approx(1 / (100 * GB), rel=0.1)


def test_what_is_placed_keeps_no_arrays_and_sums_stay_in_bounds(fleet):
    p0 = member(fleet, "p0")
    decision = PlacementDecision(p0, p0, prefill_s=1e13)
    for number in range(100):
        fleet.inflight.add(str(number), decision, 1, 0.0)
    assert all(part.decision is None for part in fleet.inflight._placements.values())
    assert p0.queued_prefill_us == 100 * PREFILL_US_MAX
    for number in range(100):
        fleet.inflight.release(str(number))
    assert (p0.queued_prefill_us, any(fleet.loads.ahead_us), any(fleet.loads.behind)) == (0, False, False)


@pytest.mark.parametrize(
    "microseconds", [0, 0.4, 0.5, 0.6, 1.5, 2.5, 3.5, 999_999.5, 1 << 40, 0.49999999999999994, 2**39 + 0.5]
)
def test_microseconds_are_rounded_as_python_does(microseconds):
    seconds = microseconds / 1e6
    assert whole_us(seconds) == round(seconds * 1e6)


def test_times_without_end_are_twelve_days():
    assert whole_us(float("inf")) == whole_us(1e12) == PREFILL_US_MAX
