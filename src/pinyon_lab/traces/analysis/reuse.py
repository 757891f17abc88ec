"""The times after which blocks are used again, and their places in a prompt: Figs. 12 to 18 (§3.4).

A reuse time is the time between two successive requests that use a block, the later one as a hit. It belongs to the
category of the earlier request where a prediction would need it (Fig. 15), to that of the later one in Fig. 14.

In Figs. 16 to 18 only a part of each request is cached, given by offset and stride in tenths of its blocks. A cell is
the share of all blocks that are then found, wherever they are in the prompt: a part from the middle on has no head.

A day's log also tells a policy for the next day what is used again, by category and hour (appendix A.1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import TURN_MAX, check_kind
from pinyon.eviction.day_fits import CATEGORIES_MAX, HOUR_S, HOURS, DayFits
from pinyon.eviction.fit import UNKNOWN, Sums, fitted
from pinyon_lab.pictures import Courses, Heat
from pinyon_lab.traces.analysis.columns import NO_TURNS, Floats, TraceColumns
from pinyon_lab.traces.analysis.figure import TraceFigure, Value, course
from pinyon_lab.traces.analysis.groups import OTHER, Categories, Windows, types_by_turn
from pinyon_lab.traces.analysis.uses import PARTS, Blocks, Step, walk

PER_DECADE = 256
LEAST_S = 1e-3
"""The end of the first class, which has all shorter times."""
DECADES = 12
BINS = 1 + PER_DECADE * DECADES
EDGES_S: NDArray[np.float64] = LEAST_S * 10.0 ** (np.arange(BINS) / PER_DECADE)
"""The end of each class, 0.9 % above its beginning; the last class has all longer times."""


def bins_of(times_s: Floats) -> NDArray[np.int64]:
    """Returns the class of each time."""
    decades = np.log10(np.maximum(times_s, LEAST_S / 2) / LEAST_S)
    bins: NDArray[np.int64] = np.clip(np.floor(decades * PER_DECADE) + 1, 0, BINS - 1).astype(np.int64)
    return bins


def quantile_s(counts: Floats, share: float) -> float | None:
    """Returns the end of the class in which ``share`` of all is reached: the quantile or up to 0.9 % more. 0: below 1
    ms."""
    total = counts.sum()
    if not total:
        return None
    found = int(np.searchsorted(np.cumsum(counts), share * total * (1 - 1e-12)))
    return float(EDGES_S[found]) if found else 0.0


def share_within(counts: Floats, limit_s: float) -> float | None:
    """Returns the share of the times up to ``limit_s``, which is taken to the end of its class."""
    total = counts.sum()
    return float(counts[: int(bins_of(np.array([limit_s]))[0]) + 1].sum() / total) if total else None


def ks_exponential(counts: Floats, mean_s: float) -> float | None:
    """Returns the Kolmogorov-Smirnov distance from an exponential distribution of this mean, at the ends of the
    classes. It is no more than the true distance, and less by at most the greatest share of a class in either
    distribution. None: there are no times, or the mean is within the first class."""
    total = counts.sum()
    if not total or mean_s < LEAST_S:
        return None
    return float(np.abs(np.cumsum(counts) / total + np.expm1(-EDGES_S / mean_s)).max())


REUSES_MIN = 32
"""The fewest reuses of a category and hour that are fitted."""
FITS_DRAWN = 4
SHOWN_LEAST_S = 0.1


class ReuseTimes:
    """Histograms of reuse times with classes 0.9 % wide, as the figures need them."""

    def __init__(self, columns: TraceColumns, categories: Categories, hours: Windows) -> None:
        self._columns = columns
        self._categories = categories
        self._hours = hours
        self._single = columns.turn == 1
        self._slot = categories.of.astype(np.int64) * len(hours) + hours.of
        slots = len(categories.names) * len(hours)
        self._all = np.zeros(BINS)
        self._singles = np.zeros(BINS)
        self._multi = np.zeros((len(columns.kinds), BINS))
        self._fits = np.zeros(slots * BINS, np.int32)
        self._sums_s = np.zeros(slots)
        self._reused = np.zeros(len(columns), bool)
        """The single-turn requests of which another one reuses something."""

    def take(self, step: Step) -> None:
        columns, runs = self._columns, step.runs
        times_s = columns.time_s[runs.row] - columns.time_s[runs.before]
        bins = bins_of(times_s)
        self._all += np.bincount(bins, runs.blocks, BINS)
        singles = self._single[runs.row] & self._single[runs.before]
        self._singles += np.bincount(bins[singles], runs.blocks[singles], BINS)
        self._reused[runs.before[singles]] = True
        multi = columns.turn[runs.row] > 1
        np.add.at(self._multi, (columns.kind[runs.row[multi]], bins[multi]), runs.blocks[multi])
        slots = self._slot[runs.before]
        np.add.at(self._fits, slots * BINS + bins, runs.blocks)
        self._sums_s += np.bincount(slots, times_s * runs.blocks, len(self._sums_s))

    def of_all(self, figure: TraceFigure) -> None:
        """Makes Fig. 12."""
        if not self._all.sum():
            return figure.without("no block is used again")
        figure.fact("reuses", "reuses of blocks", int(self._all.sum()), ",")
        for limit_s, name, paper in ((10, "10 s", "B 80 % (§3.4)"), (600, "10 min", "A 80 % (§3.4)")):
            share = share_within(self._all, limit_s)
            figure.fact(f"within_{limit_s}_s", f"within {name}", share, ".1%", paper)
        _quantiles(figure, [("all", self._all)])

    def of_singles(self, figure: TraceFigure) -> None:
        """Makes Fig. 13, reuse of single-turn requests by single-turn requests."""
        if not self._columns.has_turns:
            return figure.without(NO_TURNS)
        blocks = int(self._columns.lengths[self._single].sum())
        reused, paper = int(self._singles.sum()), "A < 30 %, B > 50 % (§3.4)"
        share = reused / max(1, blocks)
        label = "their blocks that a single-turn request uses next"
        figure.fact("reused_blocks", label, share, ".1%", paper)
        requests = float(self._reused[self._single].mean()) if self._single.any() else None
        figure.fact("reused_requests", "single-turn requests of which one uses anything next", requests, ".1%")
        figure.notes.append(
            "The paper says “of the single-turn requests”: by blocks, as a distribution has it, and by requests."
        )
        if reused:
            _quantiles(figure, [("single-turn", self._singles)])

    def of_multi(self, figure: TraceFigure) -> None:
        """Makes Fig. 14, by the type of the multi-turn request that uses blocks again."""
        if not self._multi.any():
            return figure.without("no multi-turn request uses a block again" if self._columns.has_turns else NO_TURNS)
        order = np.argsort(-self._multi.sum(axis=1), kind="stable").tolist()
        kinds = [(self._columns.kinds[kind] or "request", self._multi[kind]) for kind in order]
        _quantiles(figure, [each for each in kinds if each[1].any()])
        figure.notes.append("The paper's order, shortest first: multimodal, text, search, file (§3.4).")

    def fits(self, figure: TraceFigure) -> None:
        """Makes Fig. 15, an exponential distribution for each category and hour of the earlier use."""
        names, hours = self._categories.names, self._hours
        fits = self._fits.reshape(len(names), len(hours), BINS)
        used = np.bincount(self._slot, self._columns.lengths, len(self._sums_s)).reshape(fits.shape[:2])
        sums_s = self._sums_s.reshape(fits.shape[:2])
        labels, rows = hours.labels(), list[tuple[Value, ...]]()
        distances, weights = [], []
        for at, name in enumerate(names):
            for hour in range(len(hours)) if name != OTHER else ():
                counts = fits[at, hour]
                reuses = int(counts.sum())
                if reuses >= REUSES_MIN:
                    mean_s = float(sums_s[at, hour] / reuses)
                    distance = ks_exponential(counts.astype(np.float64), mean_s)
                    rows.append((name, labels[hour], reuses, reuses / float(used[at, hour]), mean_s, distance))
                    if distance is not None:
                        distances.append(distance)
                        weights.append(reuses)
        if not rows:
            return figure.without(f"no category has {REUSES_MIN} reuses in an hour")
        mean = float(np.average(distances, weights=weights)) if distances else None
        figure.fact("fits", "fits", len(rows), ",")
        figure.fact("mean_ks", "mean Kolmogorov-Smirnov distance, by reuses", mean, ".3f", "“fit well” (§3.4)")
        heads = {"share": (".1%", "of blocks"), "mean_s": ("s", "mean"), "ks": (".3f", "KS")}
        title = "by category and hour of the use before"
        figure.table("fits", title, rows, category="", hour="", reuses=",", **heads)
        figure.notes.append(
            "The fit is the sample's mean (maximum likelihood). KS: the greatest distance of the two distribution "
            "functions, 0 is a perfect fit; blocks of one request are reused together, so that a test of significance "
            "would be wrong. A reuse counts in the hour of the use before; those after the trace's end are not seen."
        )
        figure.plots.append(self._drawn(fits))

    def _drawn(self, fits: NDArray[np.int32]) -> Courses:
        hour = int(fits.sum(axis=(0, 2)).argmax())
        lines = []
        for at, name in enumerate(self._categories.names[:FITS_DRAWN]):
            counts = fits[at, hour].astype(np.float64)
            if counts.sum() >= REUSES_MIN:
                mean_s = float(self._sums_s.reshape(fits.shape[:2])[at, hour] / counts.sum())
                x = _bins_drawn(counts)
                lines.append(course(name, EDGES_S[x], (np.cumsum(counts) / counts.sum())[x]))
                if mean_s > 0:
                    fitted = -np.expm1(-EDGES_S[x] / mean_s)
                    lines.append(course(f"{name}, exponential", EDGES_S[x], fitted, dashed=True))
        title = f"Reuse time and its fit, hour from {self._hours.labels()[hour]}"
        return Courses(title, "reuse time, s", "reuses up to it", lines)


def _bins_drawn(counts: Floats) -> NDArray[np.int64]:
    """Returns the classes where a course bends, and a few between, from 0.1 s to a little after the last."""
    x = np.unique(np.concatenate([np.flatnonzero(counts), np.arange(0, BINS, 16)]))
    most_s = max(10.0, 2 * float(EDGES_S[np.flatnonzero(counts)[-1]]))
    found: NDArray[np.int64] = x[(EDGES_S[x] >= SHOWN_LEAST_S) & (EDGES_S[x] <= most_s)]
    return found


def _quantiles(figure: TraceFigure, named: list[tuple[str, Floats]]) -> None:
    shares = (0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.99)
    rows: list[tuple[Value, ...]] = [
        (name, int(counts.sum()), *(quantile_s(counts, share) for share in shares)) for name, counts in named
    ]
    quantiles = {f"p{round(100 * share)}_s": ("s", f"P{round(100 * share)}") for share in shares}
    figure.table("quantiles", "reuse time", rows, requests="", reuses=",", **quantiles)
    lines = []
    for name, counts in named[:8]:
        x = _bins_drawn(counts)
        lines.append(course(name, EDGES_S[x], (np.cumsum(counts) / counts.sum())[x]))
    title = figure.title[0].upper() + figure.title[1:]
    figure.plots.append(Courses(title, "reuse time, s", "reuses up to it", lines))


SETS = 1 << PARTS
TYPES_MAX = 8


class Locality:
    """Counts of blocks by the set of tenths in which earlier requests had them; any offset and stride follows from it.
    All requests fill the cache, whichever are counted."""

    def __init__(self, columns: TraceColumns) -> None:
        groups = types_by_turn(columns)
        singles = [each for each in groups if each[1] != "multi"][:TYPES_MAX]
        multis = [each for each in groups if each[1] == "multi"][:TYPES_MAX]
        self._has_turns = columns.has_turns
        self._names = [f"{kind}, {turn}-turn" for kind, turn, _ in (*singles, *multis)]
        self._singles = len(singles)
        self._group = np.full(len(columns), len(self._names), np.int64)
        for at, (_, _, rows) in enumerate((*singles, *multis)):
            self._group[rows] = at
        self._counts = np.zeros((len(self._names) + 1, SETS), np.int64)
        self._lengths = columns.lengths

    def take(self, step: Step) -> None:
        if step.cached is not None:
            group = np.repeat(self._group[step.first : step.end], self._lengths[step.first : step.end])
            flat = np.bincount(group * SETS + step.cached, minlength=self._counts.size)
            self._counts += flat.reshape(self._counts.shape)

    def of_all(self, figure: TraceFigure) -> None:
        """Makes Fig. 16."""
        _grid(figure, "all requests", self._counts.sum(axis=0))
        figure.notes.append("A prompt of fewer than ten blocks has its blocks in the tenths in which they begin.")

    def of_multi(self, figure: TraceFigure) -> None:
        """Makes Fig. 17."""
        counts = self._counts[self._singles : len(self._names)]
        if not counts.any():
            return figure.without("no multi-turn requests" if self._has_turns else NO_TURNS)
        _grid(figure, "multi-turn requests", counts.sum(axis=0))
        for name, each in zip(self._names[self._singles :], counts, strict=True):
            if len(counts) > 1:
                _grid(figure, name, each)

    def of_singles(self, figure: TraceFigure) -> None:
        """Makes Fig. 18."""
        if not self._has_turns:
            return figure.without(NO_TURNS)
        for name, counts in zip(self._names[: self._singles], self._counts, strict=False):
            _grid(figure, name, counts)
        if not figure.tables:
            figure.without("no single-turn requests")


def _grid(figure: TraceFigure, name: str, counts: NDArray[np.int64]) -> None:
    total = int(counts.sum())
    if not total:
        return
    sets = np.arange(SETS)
    rows: list[tuple[int, list[float | None]]] = []
    for stride in range(PARTS, 0, -1):
        line: list[float | None] = [None] * PARTS
        for offset in range(PARTS - stride + 1):
            part = ((1 << stride) - 1) << offset
            line[offset] = float(counts[(sets & part) != 0].sum() / total)
        rows.append((stride * 100 // PARTS, line))
    key = name.replace(", ", "_").replace("-", "_").replace(" ", "_")
    offsets = [f"{100 * offset // PARTS} %" for offset in range(PARTS)]
    heads = {f"offset_{100 * at // PARTS}": (".0%", offset) for at, offset in enumerate(offsets)}
    title, cells = f"{name}: by stride (down) and offset (across)", [(s, *v) for s, v in rows]
    figure.table(key, title, cells, stride_percent=("", "stride, %"), **heads)
    figure.plots.append(
        Heat(f"{name}, by stride", "offset", "hit ratio", offsets, [(f"{s} %", v) for s, v in rows], numbers=True)
    )


DAY_S = HOURS * HOUR_S


def day_fits(columns: TraceColumns, begins_s: float = 0.0, progress: Callable[[int], None] = lambda _: None) -> DayFits:
    """Returns the fits of the uses in the trace's last 24 hours; ``begins_s``: the time of its zero since midnight. A
    reuse counts in the hour and for the category of the use before (as in Fig. 15); those after the trace's end are not
    seen. Each hour has the categories with most reuses, at most :data:`CATEGORIES_MAX` with that of all together."""
    codes, of_row = np.unique(columns.kind.astype(np.int64) << 32 | columns.turn, return_inverse=True)
    hours = ((columns.time_s + begins_s) // HOUR_S).astype(np.int64) % HOURS
    slots, size = of_row * HOURS + hours, len(codes) * HOURS
    lately = columns.time_s > columns.time_s[-1] - DAY_S
    used = np.bincount(slots[lately], columns.lengths[lately], size)
    again, seconds = np.zeros(size), np.zeros(size)
    for step in walk(columns, Blocks(columns.numbers, parts=False)):
        row, before, _, blocks = step.runs
        of, row, before = blocks[lately[before]], row[lately[before]], before[lately[before]]
        again += np.bincount(slots[before], of, size)
        seconds += np.bincount(slots[before], of * (columns.time_s[row] - columns.time_s[before]), size)
        progress(step.end)
    sums = np.stack([used, again, seconds], axis=1).reshape(-1, HOURS, 3)
    names = [_category(columns.kinds[code >> 32], code & 0xFFFFFFFF) for code in codes.tolist()]
    found = {}
    for hour in range(HOURS):
        samples = {UNKNOWN: Sums(0.0, 0.0, 0.0)}
        for at in np.argsort(-sums[:, hour, 1], kind="stable").tolist():
            known = samples.get(names[at], (0.0, 0.0, 0.0))
            samples[names[at]] = Sums(*map(sum, zip(known, sums[at, hour].tolist(), strict=True)))
        if fits := [*fitted(samples).items()]:
            found[hour] = dict(fits[:CATEGORIES_MAX])
    return DayFits(found)


def _category(kind: str, turn: int) -> str:
    """Returns :attr:`pinyon.core.request.RequestClass.category`, or ``""`` for a category that no service knows."""
    try:
        return f"{check_kind(kind, 'type')}/{turn}" if turn <= TURN_MAX else UNKNOWN
    except InvalidArgument:
        return UNKNOWN
