"""The effect of the generator's free parameters, which nobody published, on the gain by eviction policies.

Each parameter is at the ends of its range, one at a time; at corners all of them are at an end, drawn by a seed. Traces
are from 10:00 on, so what happens at night is left out. Profile A has an eighth of its users, each as active as ever,
and an eighth of the capacity, for an hour: its conversations need their time. B has all users, as 4 % of them send
most, and an eighth of the time, as it reuses within seconds. Its capacity is that of two hours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import NamedTuple

from bench.eviction_aims import B_BLOCKS, BELOW_LRU_POINTS
from bench.eviction_cells import BELADY, LRU, OWN, Capacity, Cell, Outcome
from bench.eviction_traces import Generated
from bench.report import Aim
from pinyon_lab.traces.generate import PROFILES
from pinyon_lab.traces.generate.profile import Free

PAPERS = "workload_aware"
POLICIES = (LRU, PAPERS, OWN, BELADY)
SEED = 2
CAPACITIES = {"qwen-a": (17_000 // 8, 136_000 // 8), "qwen-b": (B_BLOCKS // 4, B_BLOCKS)}
SHORTER = {"qwen-a": {"users_share": 1 / 8, "duration_s": 3600.0}, "qwen-b": {"duration_s": 900.0}}
AT_NIGHT = {"night", "night_slower"}


class Varied(NamedTuple):
    what: str
    cell: Cell


def points_of(free: Mapping[str, Free], corners: int, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields what is varied, with all values that are not the usual ones: none, one at a time, all."""
    free = {name: each for name, each in free.items() if name not in AT_NIGHT}
    yield "usual", {}
    for name, each in free.items():
        for value in (each.low, each.high):
            yield f"{name} = {value:g}", {name: value}
    dice = Random(seed)
    for _ in range(corners):
        values = {name: dice.choice((each.low, each.high)) for name, each in free.items()}
        yield "corner: " + ", ".join(f"{name} {value:g}" for name, value in values.items()), values


def varied(corners: int, seed: int) -> list[Varied]:
    """Returns the cells of the sweep; those of one trace are neighbours."""
    return [
        Varied(what, Cell(Generated(name, SEED, tuple(values.items()), **SHORTER[name]), Capacity(blocks)))
        for name, capacities in CAPACITIES.items()
        for what, values in points_of(PROFILES[name].free, corners, seed)
        for blocks in capacities
    ]


def _of(cells: Iterable[Varied], found: Mapping[Cell, Outcome]) -> dict[tuple[str, int], dict[str, Outcome]]:
    """Returns outcomes by (profile, capacity), then by what was varied."""
    out: dict[tuple[str, int], dict[str, Outcome]] = {}
    for what, cell in cells:
        if cell in found and isinstance(cell.trace, Generated):
            out.setdefault((cell.trace.profile, cell.capacity.blocks), {})[what] = found[cell]
    return out


def aims(cells: Iterable[Varied], found: Mapping[Cell, Outcome]) -> list[Aim]:
    """Returns an aim for the worst point at each capacity."""
    out = []
    for (profile, blocks), seen in _of(cells, found).items():
        worst = min(seen, key=lambda what: seen[what].points(OWN))
        least = round(seen[worst].points(OWN), 2)
        text = f"{profile}, {blocks:,} blocks: least of {len(seen)} against LRU, points"
        out.append(Aim(text, BELOW_LRU_POINTS, least, at_most=False, reason=worst))
    return out


def results(cells: Iterable[Varied], found: Mapping[Cell, Outcome]) -> dict[str, object]:
    return {
        f"{profile}, {blocks:,} blocks": {
            what: {
                "gap_points": round(each.gap_points, 3),
                **{f"{policy}_percent": round(each.percent(policy), 3) for policy in POLICIES},
                **{f"{policy}_gap_closed_percent": each.closed_percent(policy) for policy in (PAPERS, OWN)},
            }
            for what, each in seen.items()
        }
        for (profile, blocks), seen in _of(cells, found).items()
    }


def markdown(cells: Iterable[Varied], found: Mapping[Cell, Outcome]) -> str:
    """Returns a table of all points, then one of the usual, the best and the worst point at each capacity."""
    cells = list(cells)
    title = "| profile, blocks | {} | LRU | gap, points | own closes | points | workload_aware closes | points |"
    line = "|---|---|---:|---:|---:|---:|---:|---:|"
    every, brief = [title.format("varied"), line], [title.format(""), line]
    for (profile, blocks), seen in _of(cells, found).items():
        name = f"{profile}, {blocks:,}"
        every += [_row(name, what, each) for what, each in seen.items()]
        worst = min(seen, key=lambda what: seen[what].points(OWN))
        best = max(seen, key=lambda what: seen[what].points(OWN))
        brief += [_row(name, label, seen[what]) for label, what in _labels(worst, best) if what in seen]
    return "\n".join([*every, "", *brief])


def _labels(worst: str, best: str) -> list[tuple[str, str]]:
    return [("usual", "usual"), (f"best: {best}", best), (f"worst: {worst}", worst)]


def _row(name: str, what: str, seen: Outcome) -> str:
    gap = f"{seen.gap_points:.2f}{' *' if seen.thin else ''}"
    cells = [name, what, f"{seen.percent(LRU):.2f} %", gap]
    for policy in (OWN, PAPERS):
        closed = seen.closed_percent(policy)
        cells += ["no gap" if closed is None else f"{closed:.1f} %", f"{seen.points(policy):+.2f}"]
    return f"| {' | '.join(cells)} |"
