"""Fig. 29 of "KVCache cache in the wild" (appendix A.1): whether the last day's reuse predicts the next day's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinyon.core.errors import InvalidArgument
from pinyon.eviction.day_fits import HOUR_S, HOURS
from pinyon_lab.caches.replay import CacheReplay, replayed
from pinyon_lab.figures.figure import Basis, FigureInputs, Result, Row, RowList, Table, Tell, columns, figure
from pinyon_lab.figures.rows import bars
from pinyon_lab.figures.workload import Workload
from pinyon_lab.pictures import Course, Courses, Panel
from pinyon_lab.traces.analysis import TraceColumns, day_fits, read_columns
from pinyon_lab.traces.analysis.uses import Blocks, walk

PAPER = "KVCache cache in the wild"
DAY_S = HOURS * HOUR_S
SHOWN = (9, 10)
"""The hours of the figure's two rows: 9 to 10 and 10 to 11 a.m."""
IMAGE = "multimodal/1"
CATEGORIES = ("text/1", "text/2", "search/1", "file/1", IMAGE)
"""Our choice: the first turn of each type, and a later one of ``text``."""
WITHIN_S = tuple(10 ** (step / 20) for step in range(83))
"""The times from 1 s to 3.5 h within which reuse is counted."""
SIMILAR = 0.05
"""Our choice: days count as similar up to this mean distance beyond chance; the paper does not say what similar is."""
START, END = 8, 11
REPLAYED = range(START, END)
"""The hours that are replayed; caches are empty when the first one begins."""
DAYS_MAX = 31
CAPACITY_SHARE = 0.02
"""Our choice: the cache's size, as a share of the different blocks asked for in the hours replayed."""
COST_MAX = 0.005
"""Our choice: fits count as predictive down to half a point of hits below online fits."""
COLUMNS_BYTES = 4 << 30
SHUFFLES, SEED = 40, 29

LRU, ONLINE, BOTH, LAST, OWN = "LRU", "online", "last day, online", "last day", "same day"
"""``OWN`` knows the future: in rare categories, the fate of the very blocks at hand."""
CHOICES = {
    LRU: "lru",
    ONLINE: "workload_aware",
    BOTH: "workload_aware:fits={last}",
    LAST: "workload_aware:fitted=false,fits={last}",
    OWN: "workload_aware:fitted=false,fits={day}",
}


class _Sample(NamedTuple):
    """The requests of one category in one hour of one day."""

    blocks: NDArray[np.int64]
    """The number of blocks of each request."""
    within: NDArray[np.int64]
    """The number of these blocks, by request, that are used again within each of ``WITHIN_S``."""

    @property
    def curve(self) -> NDArray[np.float64]:
        """The probability that a block is used again within each of ``WITHIN_S``."""
        return np.asarray(self.within.sum(axis=0) / max(1, int(self.blocks.sum())), np.float64)


class _Day:
    """One day's requests, the reuse of their blocks, and fits for the next day."""

    def __init__(self, workload: Workload, number: int) -> None:
        rows = [row for row in workload.rows if row.time_s // DAY_S == number]
        columns = read_columns(rows, workload.block_tokens, COLUMNS_BYTES)
        self.asked = Workload(workload.name, [row for row in rows if _hour(row.time_s) in REPLAYED], 0).asked()
        self.fits = day_fits(columns)
        within, hours = reused_within(columns), columns.time_s // HOUR_S % HOURS
        self.samples: dict[tuple[int, str], _Sample] = {}
        for hour in SHOWN:
            for category in CATEGORIES:
                kind, _, turn = category.partition("/")
                known = columns.kinds.index(kind) if kind in columns.kinds else -1
                chosen = (hours == hour) & (columns.kind == known) & (columns.turn == int(turn))
                self.samples[hour, category] = _Sample(columns.lengths[chosen], within[chosen])


def _hour(time_s: float) -> int:
    return int(time_s // HOUR_S) % HOURS


def reused_within(columns: TraceColumns) -> NDArray[np.int64]:
    """Returns each request's blocks that are used again within each of ``WITHIN_S``, as hits of an unlimited cache."""
    size = len(WITHIN_S) + 1
    counts = np.zeros(len(columns) * size)
    for step in walk(columns, Blocks(columns.numbers, parts=False)):
        row, before, _, blocks = step.runs
        bins = np.searchsorted(WITHIN_S, columns.time_s[row] - columns.time_s[before])
        counts += np.bincount(before.astype(np.int64) * size + bins, blocks, len(counts))
    return np.cumsum(counts.reshape(-1, size), axis=1)[:, :-1].astype(np.int64)


def _distance(one: _Sample, other: _Sample) -> float:
    return float(np.abs(one.curve - other.curve).max())


def _by_chance(one: _Sample, other: _Sample, rng: np.random.Generator) -> float:
    """Returns the mean distance of two samples if their requests are dealt out to two days at random."""
    blocks, within = np.concatenate([one.blocks, other.blocks]), np.concatenate([one.within, other.within])
    found = []
    for _ in range(SHUFFLES):
        order = rng.permutation(len(blocks))
        parts = order[: len(one.blocks)], order[len(one.blocks) :]
        found.append(_distance(*(_Sample(blocks[part], within[part]) for part in parts)))
    return float(np.mean(found))


@figure("wild-fig29", PAPER, "§A.1, Fig. 29", "reuse on five workdays, and fits of the last day", ("qwen_a_5d",))
def fig29(given: FigureInputs) -> Result:
    (workload,) = given.workloads
    count = int(workload.rows[-1].time_s // DAY_S) + 1
    if not 2 <= count <= DAYS_MAX:
        raise InvalidArgument(
            f"wild-fig29 needs a trace of 2 to {DAYS_MAX} days that begins at midnight, got {count}", field="trace"
        )
    days = []
    for day in range(count):
        given.tell(f"day {day + 1} of {count}: when blocks are used again")
        days.append(_Day(workload, day))
    rests_on = workload.basis
    unlike = [len({block for asked in day.asked for block in asked.blocks}) for day in days[1:]]
    capacity = max(1, round(CAPACITY_SHARE * np.mean(unlike)))
    reuse = _reuse(days)
    if not any(row["hour"] == SHOWN[0] for row in reuse):
        raise InvalidArgument(
            f"wild-fig29 needs requests of {', '.join(CATEGORIES)} from {SHOWN[0]} to {SHOWN[0] + 1} a.m. on two "
            "successive days",
            field="trace",
        )
    hits = _hits(days, capacity, given.tell)
    table = Table(
        given,
        *columns(what="category, or policy", hour=("hour", "02d")),
        *columns(Basis.MEASURED, requests=("requests", ",.0f"), reused=("used again", ".1%")),
        *columns(Basis.MEASURED, distance=("day to day", ".3f"), chance=("by chance", ".3f"), hits=("hits", ".2%")),
        basis=rests_on,
    )
    by_hour: list[Row] = [{"what": name, "hour": hour, "hits": ratio} for (name, hour), ratio in hits.items()]
    for row in [*reuse, *by_hour]:
        table.add(*(row.get(column.key) for column in table.columns), basis=rests_on)
    mark = f" ({rests_on})" if workload.generated else ""
    title = f"KVCache in the wild Fig. 29: reuse on {count} days{mark}"
    _claims(table, reuse, hits)
    return table.result(title, _panels(days, hits), _notes(count, capacity))


def _reuse(days: Sequence[_Day]) -> RowList:
    """Returns rows of means over the days, or over each day and the one before."""
    rng = np.random.default_rng(SEED)
    rows = RowList()
    for hour in SHOWN:
        for category in CATEGORIES:
            samples = [day.samples[hour, category] for day in days]
            pairs = [pair for pair in pairwise(samples) if all(len(each.blocks) for each in pair)]
            if pairs:
                rows.append(
                    {
                        "what": category,
                        "hour": hour,
                        "requests": float(np.mean([len(each.blocks) for each in samples])),
                        "reused": float(np.mean([each.curve[-1] for each in samples])),
                        "distance": float(np.mean([_distance(*pair) for pair in pairs])),
                        "chance": float(np.mean([_by_chance(*pair, rng) for pair in pairs])),
                    }
                )
    return rows


def _hits(days: Sequence[_Day], capacity: int, tell: Tell) -> Mapping[tuple[str, int], float]:
    """Returns the hit ratio by policy and hour, of all days but the first one together."""
    found: dict[tuple[str, int], float] = {}
    for name, choice in CHOICES.items():
        blocks, hits = dict.fromkeys(REPLAYED, 0), dict.fromkeys(REPLAYED, 0)
        for place, (last, day) in enumerate(pairwise(days), 2):
            tell(f"day {place} in a cache: {name}")
            chosen = choice.format(last=last.fits, day=day.fits)
            _, several = replayed(day.asked, chosen, lambda make: CacheReplay(make(), capacity))
            for asked, count in zip(day.asked, several, strict=True):
                blocks[_hour(asked.now_s)] += len(asked.blocks)
                hits[_hour(asked.now_s)] += count
        found.update({(name, hour): hits[hour] / max(1, blocks[hour]) for hour in REPLAYED})
    return found


def _claims(table: Table, reuse: RowList, hits: Mapping[tuple[str, int], float]) -> None:
    nine = {str(row["what"]): row for row in reuse if row["hour"] == SHOWN[0]}
    far = {name: row["distance"] - row["chance"] for name, row in nine.items()}
    mean, chance = (sum(row[key] for row in nine.values()) / len(nine) for key in ("distance", "chance"))
    lost = max(hits[ONLINE, hour] - hits[LAST, hour] for hour in REPLAYED)
    others = max(far, key=lambda name: (name != IMAGE, far[name]))
    by_hour = {name: ", ".join(f"{hits[name, hour]:.2%}" for hour in REPLAYED) for name in CHOICES}
    table.says(
        "the reuse probability at 9:00 a.m. to 10:00 a.m. similar between workdays",
        f"{mean:.3f} apart",
        mean - chance <= SIMILAR,
        f"mean over the categories; the same requests dealt out to the days at random are {chance:.3f} apart. Up "
        f"to {SIMILAR} more taken as similar",
    )
    table.says(
        "we can analyze the reuse log of last day offline to predict the reuse probability of each category in the "
        "next day",
        f"{100 * lost:.1f} points of hits below fits to what is seen, at most",
        lost <= COST_MAX,
        f"up to {100 * COST_MAX} taken as predicted. From {START} to {END} a.m., by hour: "
        + "; ".join(f"{by_hour[name]} {name}" for name in (LAST, ONLINE, BOTH, LRU, OWN)),
    )
    table.says(
        'the reuse probability of "image" type is harder to predict than other categories',
        f"{IMAGE} {far[IMAGE]:+.3f} against chance" if IMAGE in far else f"no {IMAGE} here",
        IMAGE in far and far[IMAGE] > far[others],
        f"the farthest of the others is {others}: {far[others]:+.3f}; the generator draws all types alike, on all days",
    )


def _notes(count: int, capacity: int) -> list[str]:
    return [
        f"{count} days. Day to day: the greatest distance of two successive days' courses of the share of a category's "
        "blocks that is used again within a time, mean over the days. By chance: the same for the same requests dealt "
        f"out to the two days at random, mean of {SHUFFLES}. Requests: a day's.",
        f"Hits: of days 2 to {count} together, each from {START}:00 in an empty cache of {capacity:,} blocks: "
        f"{CAPACITY_SHARE:.0%} of the different ones asked for until {END}:00; the paper has no such numbers. Online: "
        "workload_aware as it is. Last day: with that day's fits and no others; last day, online: until enough is "
        "seen. Same day: with fits of the very day, which know the future.",
        "The generator has the same parameters on all days; only their numbers of requests differ, by up to 10 %: that "
        "the days are alike is put in. What a day's fits are worth in a cache on the next one is not.",
    ]


def _panels(days: Sequence[_Day], hits: Mapping[tuple[str, int], float]) -> list[Panel]:
    by_day = [
        Courses(
            f"{hour} to {hour + 1} a.m., a line for each day",
            "time since the last use, s",
            "blocks used again within it",
            [
                Course(category, list(zip(WITHIN_S, day.samples[hour, category].curve.tolist(), strict=True)))
                for category in CATEGORIES
                for day in days
                if len(day.samples[hour, category].blocks)
            ],
        )
        for hour in SHOWN
    ]
    title = f"Hits in an empty cache from {START}:00, day 2 and later"
    return [*by_day, bars(title, "blocks that hit", hits, ".1%", label=lambda hour: f"{hour} to {hour + 1} a.m.")]
