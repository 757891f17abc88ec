"""The places of reused blocks in a prompt: Figs. 16 to 18 (§3.4).

Of each request only a part is cached, given by offset and stride in tenths of its blocks. A cell is the share of all
blocks that are then found, wherever they are in the prompt: a part from the middle on has no head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pinyon_lab.pictures import Heat
from pinyon_lab.traces.analysis.columns import NO_TURNS, Columns
from pinyon_lab.traces.analysis.figure import Column, Figure, Table
from pinyon_lab.traces.analysis.groups import types_by_turn
from pinyon_lab.traces.analysis.uses import PARTS, Step

SETS = 1 << PARTS
TYPES_MAX = 8


class Locality:
    """Counts of blocks by the set of tenths in which earlier requests had them; any offset and stride follows from it.
    All requests fill the cache, whichever are counted."""

    def __init__(self, columns: Columns) -> None:
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

    def of_all(self) -> Figure:
        """Returns Fig. 16."""
        figure = Figure("16", "hit ratio by offset and stride of what is cached")
        _grid(figure, "all requests", self._counts.sum(axis=0))
        figure.notes.append("A prompt of fewer than ten blocks has its blocks in the tenths in which they begin.")
        return figure

    def of_multi(self) -> Figure:
        """Returns Fig. 17."""
        figure = Figure("17", "hit ratio of multi-turn requests by offset and stride")
        counts = self._counts[self._singles : len(self._names)]
        if not counts.any():
            return figure.without("no multi-turn requests" if self._has_turns else NO_TURNS)
        _grid(figure, "multi-turn requests", counts.sum(axis=0))
        for name, each in zip(self._names[self._singles :], counts, strict=True):
            if len(counts) > 1:
                _grid(figure, name, each)
        return figure

    def of_singles(self) -> Figure:
        """Returns Fig. 18."""
        figure = Figure("18", "hit ratio of single-turn requests by type, offset and stride")
        if not self._has_turns:
            return figure.without(NO_TURNS)
        for name, counts in zip(self._names[: self._singles], self._counts, strict=False):
            _grid(figure, name, counts)
        return figure if figure.tables else figure.without("no single-turn requests")


def _grid(figure: Figure, name: str, counts: NDArray[np.int64]) -> None:
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
    cells = (Column(f"offset_{100 * at // PARTS}", ".0%", offset) for at, offset in enumerate(offsets))
    heads = (Column("stride_percent", "", "stride, %"), *cells)
    figure.tables.append(Table(key, f"{name}: by stride (down) and offset (across)", heads, [(s, *v) for s, v in rows]))
    figure.plots.append(
        Heat(f"{name}, by stride", "offset", "hit ratio", offsets, [(f"{s} %", v) for s, v in rows], numbers=True)
    )
