"""How long blocks live: from the first use to the last (§3.5). Figs. 19 and 20."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pinyon_lab.pictures import Courses
from pinyon_lab.traces.analysis.categories import Categories
from pinyon_lab.traces.analysis.figure import Column, Figure, Table, course
from pinyon_lab.traces.analysis.turns import WindowMeans
from pinyon_lab.traces.analysis.uses import Survey
from pinyon_lab.traces.analysis.windows import Windows

SHOWN_LEAST_S = 0.1
STEP_BLOCKS = 1 << 20


def _spans_s(survey: Survey) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float64]]]:
    """Of each block the row that stored it and its lifespan; some blocks at a time, to save memory."""
    blocks, time_s = survey.blocks, survey.columns.time_s
    for begin in range(0, len(blocks.first), STEP_BLOCKS):
        first, last = blocks.first[begin : begin + STEP_BLOCKS], blocks.last[begin : begin + STEP_BLOCKS]
        some = first >= 0
        yield first[some], time_s[last[some]] - time_s[first[some]]


def lifespans(survey: Survey) -> Figure:
    """Fig. 19. A block that is never used again has lived for 0 s."""
    figure = Figure("19", "lifespan of blocks")
    spans_s = np.empty(np.count_nonzero(survey.blocks.first >= 0))
    at = 0
    for _, some_s in _spans_s(survey):
        spans_s[at : at + len(some_s)] = some_s
        at += len(some_s)
    if not len(spans_s):
        return figure.without("no request has a block")
    figure.fact("blocks", "blocks", len(spans_s), ",")
    figure.fact("reused", "used again", float((survey.blocks.uses > 1).sum() / len(spans_s)), ".1%")
    figure.fact("mean_s", "mean", float(spans_s.mean()), "s")
    spans_s.sort()
    papers = {0.5: "", 0.9: "A 612 s, B 0.3 s (§3.5)", 0.99: "B 97 s (§1)", 1.0: "A 800 min, B 1,200 min (§3.5)"}
    for share, paper in papers.items():
        name = "max" if share == 1 else f"P{round(100 * share)}"
        value = float(spans_s[min(len(spans_s), max(1, int(np.ceil(share * len(spans_s))))) - 1])
        figure.fact(f"{name.lower()}_s", name, value, "s", paper)
    x = np.geomspace(SHOWN_LEAST_S, max(10 * SHOWN_LEAST_S, float(spans_s[-1])), 200)
    y = np.searchsorted(spans_s, x, side="right") / len(spans_s)
    figure.plots.append(Courses("Lifespan of blocks", "lifespan, s", "blocks up to it", [course("blocks", x, y)]))
    heads = (Column("lifespan_s", "up to", "s"), Column("share", "of blocks", ".1%"))
    limits = (0.0, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0)
    rows = [(limit, float(np.searchsorted(spans_s, limit, side="right") / len(spans_s))) for limit in limits]
    figure.tables.append(Table("cdf", "blocks by lifespan", heads, list(rows)))
    return figure


def lifespans_by_category(survey: Survey, categories: Categories, windows: Windows) -> Figure:
    """Fig. 20: the mean, by category and window of the request that stored the block."""
    figure = Figure("20", "mean lifespan of blocks by category")
    means = WindowMeans(categories, windows)
    for first, spans_s in _spans_s(survey):
        means.add(first, spans_s)
    if not means.counts.any():
        return figure.without("no request has a block")
    means.show(figure, "mean lifespan", "s")
    figure.notes.append("Blocks that are stored near the trace's end have less time to be used again than others.")
    return figure
