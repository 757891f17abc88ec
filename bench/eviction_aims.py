"""The aims of pinyon's own eviction policy, and their traces: none that it was tuned on.

The policy was tuned on the profiles' seed 1 and on the first halves of the public traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench.eviction_cells import BELADY, LRU, OWN, THIN_GAP_POINTS, Capacity, Cell, Outcome
from bench.eviction_traces import SECOND_HALF, WHOLE, Generated, Public, Trace
from bench.report import Aim

BELOW_LRU_POINTS = -0.5
"""The lowest difference to LRU, in points, that is allowed on any trace."""
SEEDS = (2, 3)
A_PERCENT = {17_000: 20.0, 68_000: 15.0, 136_000: 9.0, 272_000: 10.0}
"""The percentage of the gap to be closed, by capacity in blocks of 16 tokens."""
B_PERCENT: Mapping[float, float | None] = {0.25: None, 1.0: 80.0, 4.0: None}
"""The percentage to close by capacity in percent of the distinct blocks; None: no aim but not to be below LRU."""
CONVERSATION_PERCENT = {1.0: 20.0, 2.0: 20.0, 5.0: 12.0, 10.0: 12.0}
B_BLOCKS = 28_000
"""One percent of the distinct blocks of B's two hours, for fewer requests at the same rate."""
ELSEWHERE = (1.0, 2.0, 5.0, 10.0, 20.0)
QUICK_SHARE = 1 / 8
PARTS = ("qwen-a", "qwen-b", "conversation", "elsewhere")


class Wanted(NamedTuple):
    cell: Cell
    percent: float | None = None
    """The percentage of the gap to be closed; None: this cell is only to be not below LRU."""


def wanted(traces: Path, quick: bool) -> dict[str, list[Wanted]]:
    """Returns the wanted cells by part; ``quick`` has a smaller profile A, a shorter B, and fewer capacities."""
    seeds = SEEDS[:1] if quick else SEEDS
    share = QUICK_SHARE if quick else 1.0
    a = [
        Wanted(Cell(Generated("qwen-a", seed, users_share=share), Capacity(round(blocks * share))), percent)
        for seed in seeds
        for blocks, percent in A_PERCENT.items()
    ]
    b = (
        [Wanted(Cell(Generated("qwen-b", seeds[0], duration_s=900.0), Capacity(B_BLOCKS)), B_PERCENT[1.0])]
        if quick
        else [
            Wanted(Cell(Generated("qwen-b", seed), Capacity(percent=size)), percent)
            for seed in seeds
            for size, percent in B_PERCENT.items()
        ]
    )
    parts = (SECOND_HALF,) if quick else (WHOLE, SECOND_HALF)
    conversation = [
        Wanted(Cell(Public("mooncake_conversation", traces), Capacity(percent=size), part), percent)
        for part in parts
        for size, percent in CONVERSATION_PERCENT.items()
    ]
    others: list[Trace] = [Public("mooncake_synthetic", traces), Public("claude_code_a", traces)]
    if not quick:
        others.append(Generated("toolagent", SEEDS[0]))
    elsewhere = [
        Wanted(Cell(trace, Capacity(percent=size), part)) for trace in others for part in parts for size in ELSEWHERE
    ]
    return dict(zip(PARTS, (a, b, conversation, elsewhere), strict=True))


def aims(cells: Iterable[Wanted], found: Mapping[Cell, Outcome], why_not: Mapping[Cell, str]) -> list[Aim]:
    """Returns an aim for each cell that has one, and one for all of them: never far below LRU."""
    cells = list(cells)
    out = [_closed(each, found.get(each.cell), why_not) for each in cells if each.percent is not None]
    measured = {each.cell: found[each.cell].points(OWN) for each in cells if each.cell in found}
    text = f"least of {len(measured)} of {len(cells)} replays against LRU, points"
    if not measured:
        return [*out, Aim(text, BELOW_LRU_POINTS, None, at_most=False, reason="none was made")]
    worst = min(measured, key=measured.__getitem__)
    least = round(measured[worst], 2)
    return [*out, Aim(text, BELOW_LRU_POINTS, least, at_most=False, reason=f"on {worst}")]


def _closed(each: Wanted, seen: Outcome | None, why_not: Mapping[Cell, str]) -> Aim:
    assert each.percent is not None
    if seen is None:
        reason = why_not.get(each.cell, "not measured")
        return Aim(f"{each.cell}: gap closed, %", each.percent, None, at_most=False, reason=reason)
    closed = seen.closed_percent(OWN)
    text = f"{each.cell}: closed of a gap of {seen.gap_points:.2f} points, %"
    if closed is None:
        return Aim(text, each.percent, None, at_most=False, reason="LRU hits as much as Belady: there is no gap")
    reason = f"the gap is below {THIN_GAP_POINTS:g} point: a share of it says little" if seen.thin else ""
    return Aim(text, each.percent, round(closed, 1), at_most=False, reason=reason)


def results(cells: Iterable[Wanted], found: Mapping[Cell, Outcome]) -> dict[str, object]:
    return {
        str(each.cell): {
            "capacity_blocks": seen.capacity,
            "blocks": seen.blocks,
            **{f"{policy}_hit_blocks": seen.hits[policy] for policy in (LRU, OWN, BELADY)},
            "gap_points": round(seen.gap_points, 3),
            "thin_gap": seen.thin,
            "own_points": round(seen.points(OWN), 3),
            "own_gap_closed_percent": seen.closed_percent(OWN),
            "own_replay_cpu_us_per_evicted_block": round(seen.us_per_evicted(OWN), 2),
        }
        for each in cells
        if (seen := found.get(each.cell)) is not None
    }


def markdown(cells: Iterable[Wanted], found: Mapping[Cell, Outcome]) -> str:
    """Returns a row for each cell, as docs/notebook/benchmarks.md has it; ``*`` marks a thin gap."""
    lines = [
        "| trace | capacity | LRU | own | Belady | gap, points | closed | aim | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for each in cells:
        cell, percent = each
        if (seen := found.get(cell)) is None:
            continue
        closed = seen.closed_percent(OWN)
        shown = "no gap" if closed is None else f"{closed:.1f} %"
        verdict = f"{seen.points(OWN):+.2f} points" if percent is None else _verdict(_closed(each, seen, {}))
        where = cell.trace.name if cell.part == WHOLE else f"{cell.trace.name}, {cell.part}"
        hits = " | ".join(f"{seen.percent(policy):.2f} %" for policy in (LRU, OWN, BELADY))
        aim = "–" if percent is None else f"{percent:g} %"
        gap = f"{seen.gap_points:.2f}{' *' if seen.thin else ''}"
        lines.append(f"| {where} | {cell.capacity} | {hits} | {gap} | {shown} | {aim} | {verdict} |")
    return "\n".join(lines)


def _verdict(aim: Aim) -> str:
    return "met" if aim.met else "not met"
