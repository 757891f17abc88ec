"""The results that ``./dev bench eviction`` derives from replays: shares of a gap, halves, aims, the sweep."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import eviction, eviction_aims, eviction_sweep
from bench.eviction_aims import Wanted, aims, markdown, wanted
from bench.eviction_cells import BELADY, LRU, OWN, Capacity, Cell, Outcome, measure, measure_all
from bench.eviction_decision import Playback, _run, decision_us, decisions
from bench.eviction_sweep import points_of, varied
from bench.eviction_traces import SECOND_HALF, WHOLE, Generated, Public, part_of, requests_of
from pinyon.core.errors import NotFound
from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS
from pinyon_lab.caches.replay import CacheRequest
from pinyon_lab.traces.generate import PROFILES, profile

POLICIES = (LRU, OWN, BELADY)
CELL = Cell(Generated("qwen-a", 2), Capacity(17))


def outcome(lru: int, own: int, belady: int, blocks: int = 1000) -> Outcome:
    hits = {LRU: lru, OWN: own, BELADY: belady, "workload_aware": lru}
    return Outcome(17, blocks, hits, dict.fromkeys(hits, 10), dict.fromkeys(hits, 0.001))


def write(folder: Path, *of_each: list[int]) -> Public:
    """Writes a public trace with a request per second."""
    rows = [
        {"timestamp": 1000 * second, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for second, ids in enumerate(of_each)
    ]
    (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Public("some", folder)


# -- the share of the gap


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_the_share_of_the_gap_is_of_what_there_is_to_gain(lru: int, own: int, belady: int) -> None:
    seen = outcome(lru, own, belady)
    closed = seen.closed_percent(OWN)
    if belady <= lru:
        assert closed is None
        return
    assert closed is not None
    assert closed * seen.gap_points / 100 == pytest.approx(seen.points(OWN))
    assert seen.closed_percent(LRU) == 0
    assert seen.closed_percent(BELADY) == 100
    assert seen.thin == (belady - lru < 10)  # 10 of 1000 blocks are a point


def test_nothing_asked_for_is_no_gap() -> None:
    seen = outcome(0, 0, 0, blocks=0)
    assert seen.gap_points == seen.points(OWN) == 0
    assert seen.closed_percent(OWN) is None


def test_capacities_are_blocks_or_of_what_is_unlike() -> None:
    assert [Capacity(17).of(100), Capacity(percent=2).of(1000), Capacity(percent=1).of(3)] == [17, 20, 1]
    assert [str(Capacity(17_000)), str(Capacity(percent=0.25))] == ["17,000 blocks", "0.25 %"]


# -- halves


@given(st.integers(0, 9))
def test_the_second_half_has_nothing_of_the_first(count: int) -> None:
    requests = [CacheRequest([number], float(number), NO_TRAITS) for number in range(count)]
    second = list(part_of(requests, SECOND_HALF))
    assert len(second) == count // 2
    assert second == requests[count - len(second) :]
    assert part_of(requests, WHOLE) == requests


def test_a_half_is_measured_with_an_empty_cache_of_its_own_size(tmp_path: Path) -> None:
    trace = write(tmp_path, [1, 2], [3, 4], [5, 6], [1, 2], [1, 7], [1, 2])
    whole = measure(Cell(trace, Capacity(percent=100)), POLICIES)
    half = measure(Cell(trace, Capacity(percent=100), SECOND_HALF), POLICIES)
    assert (whole.capacity, whole.blocks, whole.hits[LRU]) == (7, 12, 2 + 1 + 2)
    assert (half.capacity, half.blocks, half.hits[LRU]) == (3, 6, 1 + 2)
    assert half.hits == dict.fromkeys(POLICIES, 3)  # all of it fits
    assert half.evicted == dict.fromkeys(POLICIES, 0)


def test_processes_measure_what_this_one_does(tmp_path: Path) -> None:
    trace = write(tmp_path, *([number % 5, 10 + number % 3] for number in range(40)))
    cells = [Cell(trace, Capacity(blocks)) for blocks in (2, 4)]
    found: dict[Cell, Outcome] = {}
    measure_all(cells, POLICIES, 1, 120.0, found.__setitem__)
    requests_of.cache_clear()
    assert {cell: seen.hits for cell, seen in found.items()} == {cell: measure(cell, POLICIES).hits for cell in cells}


# -- traces


def test_a_public_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    trace = Public("some", tmp_path)
    assert trace.missing == f"no some.jsonl[.gz] in {tmp_path}"
    with pytest.raises(NotFound):
        trace.workload()
    assert not write(tmp_path, [1]).missing


def test_a_generated_trace_is_named_by_changes_to_its_profile() -> None:
    assert Generated("qwen-a", 2).name == "qwen-a, seed 2"
    some = Generated("qwen-b", 3, (("users", 200.0),), 0.125, 900.0)
    assert some.name == "qwen-b, seed 3, users 200, 0.125 of the users, 15 min"


def test_fewer_users_are_as_active_as_all() -> None:
    whole = Generated("qwen-b", 2, duration_s=60.0)
    quarter = replace(whole, users_share=0.25)
    many, few = whole.workload().rows, quarter.workload().rows
    assert max(int(row.user) for row in few) < 100 <= max(int(row.user) for row in many)
    assert 0.1 < len(few) / len(many) < 0.5  # jobs come in bursts
    assert max(row.time_s for row in few) > 50


# -- aims


def test_every_aim_is_on_what_the_policy_was_not_tuned_on(tmp_path: Path) -> None:
    parts = wanted(tmp_path, quick=False)
    assert tuple(parts) == eviction_aims.PARTS
    cells = [each for part in parts.values() for each in part]
    assert len({each.cell for each in cells}) == len(cells)
    assert {each.cell.trace.seed for each in cells if isinstance(each.cell.trace, Generated)} == {2, 3}
    seen = {(str(each.cell.capacity), each.percent) for each in parts["qwen-a"]}
    assert seen == {("17,000 blocks", 20), ("68,000 blocks", 15), ("136,000 blocks", 9), ("272,000 blocks", 10)}
    assert ("1 %", 80.0) in {(str(each.cell.capacity), each.percent) for each in parts["qwen-b"]}
    halves = {str(each.cell.capacity): each.percent for each in parts["conversation"] if each.cell.part == SECOND_HALF}
    assert halves == {"1 %": 20, "2 %": 20, "5 %": 12, "10 %": 12}


def test_an_aim_says_what_was_seen_or_why_not() -> None:
    cells = [Wanted(replace(CELL, capacity=Capacity(blocks)), 20.0) for blocks in (1, 2, 3, 4)]
    one, two, three, four = (each.cell for each in cells)
    found = {one: outcome(100, 130, 200), two: outcome(100, 104, 105), three: outcome(100, 94, 100)}
    closed, thin, no_gap, missing, least = aims(cells, found, {four: "no such file"})
    assert (closed.measured, closed.met, closed.reason) == (30.0, True, "")
    assert (thin.measured, thin.met) == (80.0, True)
    assert "gap of 0.50 points" in thin.name
    assert "says little" in thin.reason
    assert (no_gap.measured, no_gap.met) == (None, False)
    assert "no gap" in no_gap.reason
    assert (missing.measured, missing.met, missing.reason) == (None, False, "no such file")
    assert (least.measured, least.met) == (-0.6, False)
    assert least.reason == f"on {three}"
    assert "3 of 4" in least.name


def test_the_least_is_of_all_replays_and_half_a_point_is_allowed() -> None:
    cells = [Wanted(CELL), Wanted(replace(CELL, part=SECOND_HALF))]
    found = {cells[0].cell: outcome(100, 95, 200), cells[1].cell: outcome(100, 180, 200)}
    (least,) = aims(cells, found, {})
    assert (least.measured, least.met) == (-0.5, True)
    (none,) = aims(cells, {}, {})
    assert (none.measured, none.met) == (None, False)


def test_the_table_has_a_row_for_each_that_was_measured() -> None:
    cells = [Wanted(CELL, 20.0), Wanted(replace(CELL, part=SECOND_HALF)), Wanted(replace(CELL, capacity=Capacity(1)))]
    found = {cells[0].cell: outcome(100, 104, 105), cells[1].cell: outcome(100, 90, 200)}
    _, _, first, second = markdown(cells, found).splitlines()
    row = "| qwen-a, seed 2 | 17 blocks | 10.00 % | 10.40 % | 10.50 % | 0.50 * | 80.0 % | 20 % | met |"
    assert first == row
    assert second.endswith("| 10.00 | -10.0 % | – | -1.00 points |")


# -- what a decision costs


def test_what_is_played_back_leaves_the_same_blocks() -> None:
    requests = requests_of(Generated("toolagent", 2, duration_s=20.0))
    _, gone = _run(requests, EVICTION_POLICIES.make(OWN), 50)
    _, again = _run(requests, Playback(gone), 50)
    assert sum(map(len, gone)) > 100
    assert again == gone


def test_evicted_blocks_are_those_without_room() -> None:
    requests = [CacheRequest([number], float(number), NO_TRAITS) for number in range(30)]
    assert decision_us(requests, LRU, 10)[1] == 20
    found = decisions(requests, 10, (LRU, OWN), rounds=3)
    assert list(found) == [LRU, OWN]
    assert {each["evicted_blocks"] for each in found.values()} == {20}
    assert all(each["min"] <= each["median"] <= each["max"] for each in found.values())


# -- the sweep


@pytest.mark.parametrize("name", sorted(eviction_sweep.CAPACITIES))
def test_every_free_parameter_is_at_both_ends_and_corners_at_all(name: str) -> None:
    free = {key: each for key, each in PROFILES[name].free.items() if not key.startswith("night")}
    points = list(points_of(PROFILES[name].free, 5, seed=3))
    assert points[0] == ("usual", {})
    ends = {(key, value) for key, each in free.items() for value in (each.low, each.high)}
    alone = [values for _, values in points[1 : 1 + len(ends)]]
    assert {item for values in alone for item in values.items()} == ends
    assert all(len(values) == 1 for values in alone)
    corners = [values for _, values in points[1 + len(ends) :]]
    assert len(corners) == 5
    assert all(set(values) == set(free) and set(values.items()) <= ends for values in corners)
    assert points == list(points_of(PROFILES[name].free, 5, seed=3)) != list(points_of(free, 5, seed=4))
    for _, values in points:
        profile(name, **values)


def test_the_sweep_names_the_worst_point() -> None:
    cells = [each for each in varied(1, 1) if each.cell.trace.profile == "qwen-b"]
    found = {each.cell: outcome(100, 120, 200) for each in cells}
    first, *_, last = cells
    found[first.cell], found[last.cell] = outcome(100, 80, 200), outcome(100, 40, 200)
    low, high = eviction_sweep.aims(cells, found)
    assert (low.measured, low.reason, low.met) == (-2.0, "usual", False)
    assert (high.measured, high.reason) == (-6.0, last.what)
    table = eviction_sweep.markdown(cells, found)
    assert table.count("\n") == 1 + len(cells) + 1 + 2 + 2 * 3
    assert f"| worst: {last.what} | 10.00 % | 10.00 | -60.0 % | -6.00 |" in table
    assert set(eviction_sweep.results(cells, found)) == {"qwen-b, 7,000 blocks", "qwen-b, 28,000 blocks"}


# -- the command


def test_without_the_public_traces_their_aims_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["eviction", "--only", "conversation", "global", "--traces", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", asked)
        eviction.main()
    said = capsys.readouterr()
    report = json.loads(said.out.splitlines()[-1])
    assert all(aim["measured"] is None and not aim["met"] for aim in report["aims"])
    assert {aim["reason"] for aim in report["aims"]} >= {f"no mooncake_conversation.jsonl[.gz] in {tmp_path}"}
    assert "skipped: no mooncake_conversation" in said.err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--only", "everything"],
        ["--traces", "/nowhere/at/all"],
        ["--processes", "0"],
        ["--corners", "-1"],
        ["--sweep", "--quick"],
    ],
)
def test_wrong_options_are_one_line(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eviction", *wrong])
    with pytest.raises(SystemExit) as ended:
        eviction.main()
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]
