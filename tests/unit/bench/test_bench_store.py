"""The store benchmark: its rows, ratios and aims, its objects, and its timed part on a store in memory."""

import os

import pytest
from rich.console import Console

from bench.store import size
from bench.store_figures import (
    EXISTS,
    GET,
    KIB,
    MIB,
    OURS,
    PEER,
    PUT,
    REDIS,
    SHM,
    SIZES,
    Measured,
    Row,
    Sample,
    aims,
    crowd_figures,
    figures,
    groups,
    results,
)
from bench.store_memory import PAGE, Item, ObjectMemory
from bench.store_rows import Measurement
from bench.store_tables import crowd_table, row_table


def sample(ops_s, batch=1):
    """Returns a sample of ten calls with as many operations per second."""
    seconds = 10 * batch / ops_s
    return Sample([seconds / 10 * 1e6] * 10, seconds, seconds / 2, seconds / 4, batch)


def measured(row, ours, peers):
    return Measured(
        {(OURS.name, row): [sample(each) for each in ours], (PEER.name, row): [sample(each) for each in peers]}
    )


def shown(table):
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_rows_are_single_and_batched_and_end_with_questions():
    rows = [row for group in groups(SIZES) for row in group]
    assert len(set(rows)) == len(rows) == 22
    assert [row.name for row in rows[:4]] == ["put 4 KiB", "get 4 KiB", "put 64 × 4 KiB", "get 64 × 4 KiB"]
    assert "put 8 × 16 MiB" in [row.name for row in rows]
    assert [row.name for row in rows[-2:]] == ["exists 1 key", "exists 4,096 keys"]


@pytest.mark.parametrize(
    ("row", "least"),
    [
        (Row(PUT, 4 * KIB, 1), 1.0), (Row(GET, 4 * KIB, 64), 1.5), (Row(GET, 64 * KIB, 1), 1.5),
        (Row(PUT, 16 * MIB, 8), 1.5), (Row(EXISTS, 4 * KIB, 4096), 0.5),
    ],
)  # fmt: skip
def test_aims_by_row(row, least):
    assert row.aim == least


def test_a_ratio_is_the_median_of_those_within_a_round():
    row = Row(PUT, MIB, 1)
    assert measured(row, [100, 300, 50], [100, 100, 100]).ratio(row) == pytest.approx(1.0)
    # A slow round slows both down, and changes nothing.
    assert measured(row, [200, 20, 200], [100, 10, 100]).ratio(row) == pytest.approx(2.0)
    assert measured(row, [200], []).ratio(row) is None


def test_aims_are_met_from_their_target_on():
    row = Row(PUT, MIB, 1)
    (met,) = aims(measured(row, [150], [100]), [row])
    (missed,) = aims(measured(row, [149], [100]), [row])
    assert (met.met, met.measured) == (True, 1.5)
    assert not missed.met


def test_a_missing_side_has_no_figures_and_says_why():
    row = Row(PUT, MIB, 1)
    without = Measured({(OURS.name, row): [sample(100)]}, {PEER.name: "it needs libibverbs1"})
    (aim,) = aims(without, [row])
    assert (aim.measured, aim.met, aim.reason) == (None, False, "it needs libibverbs1")
    assert set(results(without, (OURS, SHM, PEER, REDIS))) == {OURS.name}
    assert "1.00" not in shown(row_table(without, [row]))


def test_figures_count_objects_and_time_calls():
    row = Row(PUT, MIB, 64)
    found = figures(row, [sample(1000, 64), sample(500, 64)])
    assert found["ops_s"]["median"] == 750
    assert found["gb_s"]["max"] == pytest.approx(1000 * MIB / 1e9, abs=1e-3)
    assert found["p50_us"] == pytest.approx(64 / 1000 * 1e6)
    assert found["p99_us"] == pytest.approx(64 / 500 * 1e6)
    assert found["client_cpu_us"] == 2 * found["server_cpu_us"] == pytest.approx(750)
    assert "gb_s" not in figures(Row(EXISTS, 4 * KIB, 64), [sample(1000, 64)])


def test_tables_have_each_side_and_its_limits():
    row = Row(PUT, MIB, 1)
    found = measured(row, [300], [100])
    phase = {"spent_us": [10.0, 20.0], "seconds": 1.0, "client_cpu_s": 0.2, "server_cpu_s": 0.1, "failed": 3,
             "failure": "no answer", "wrong": 0}  # fmt: skip
    found.crowds = {PEER.name: {"open": 17, "stopped_by": "no threads", PUT: phase, GET: phase}}
    assert "3.00" in shown(row_table(found, [row]))
    table = shown(crowd_table(found))
    assert all(word in table for word in ("17", "no threads", "3 failed: no answer"))
    assert crowd_figures(found.crowds[PEER.name])[PUT]["ops_s"] == 2


def test_sizes_by_their_labels():
    assert [size(text) for text in ("4k", "64K", "1m", "4M", "16m")] == list(SIZES)


def test_objects_differ_in_every_page_and_a_wrong_byte_is_found():
    memory = ObjectMemory(16 * PAGE, seed=1)
    items = [Item(b"a", 7, 0), Item(b"b", 8, 4 * PAGE)]
    memory.stamp(items, 4 * PAGE)
    pages = {bytes(memory.source.view[at * PAGE : at * PAGE + 8]) for at in range(8)}
    assert len(pages) == 8
    assert memory.wrong(items, 4 * PAGE) == 2
    memory.landing.view[: 8 * PAGE] = memory.source.view[: 8 * PAGE]
    assert memory.wrong(items, 4 * PAGE) == 0
    memory.landing.view[6 * PAGE + 100] ^= 1
    assert memory.wrong(items, 4 * PAGE) == 1


class DictStore:
    """A store in this process, which may lose or spoil what it is given."""

    def __init__(self, memory, spoil=False):
        self.memory, self.spoil, self.held = memory, spoil, {}

    def name(self, number):
        return number

    async def put(self, items, size):
        for item in items:
            assert item.key not in self.held
            self.held[item.key] = bytes(self.memory.source.view[item.offset : item.offset + size])

    async def get(self, items, size):
        for item in items:
            found = self.held[item.key]
            self.memory.landing.view[item.offset : item.offset + size] = bytes(size) if self.spoil else found

    async def exists(self, keys):
        return [key in self.held or self.spoil for key in keys]

    async def remove(self, keys):
        for key in keys:
            del self.held[key]

    async def settle(self, items, size):
        pass

    def land(self, items, size):
        pass

    def facts(self):
        return {}


@pytest.mark.parametrize("spoil", [False, True])
async def test_a_row_checks_what_it_got_and_leaves_nothing(spoil):
    memory = ObjectMemory(64 * PAGE, seed=1)
    store = DictStore(memory, spoil)
    measurement = Measurement(store, memory, {"server": os.getpid()})
    for batch in (1, 4):
        put = await measurement.do_put(2 * PAGE, batch, 10.0)
        assert len(put["spent_us"]) == 32 // batch
        assert len(store.held) == 32
        got = await measurement.do_get(2 * PAGE, batch, 0.01)
        assert bool(got["wrong"]) == spoil
        await measurement.do_remove()
        assert not store.held
    asked = await measurement.do_exists(PAGE, 8, 0.01)
    assert bool(asked["wrong"]) == spoil
    await measurement.do_remove()
    assert not store.held
