"""One walk over a trace's blocks, and what the figures keep of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from pinyon_lab.traces.analysis.columns import Columns
from pinyon_lab.traces.analysis.uses import Blocks, Step, walk

__all__ = ["Survey", "Taker"]


class Taker(Protocol):
    """Takes note of what a figure needs."""

    def take(self, step: Step) -> None:
        """Of some successive requests."""


class Survey:
    """``hits``: of each request, blocks; ``blocks``: as they are at the end."""

    def __init__(self, columns: Columns, *, parts: bool) -> None:
        self.columns = columns
        self.hits = np.zeros(len(columns), np.int32)
        self.blocks = Blocks(columns.numbers, parts=parts)

    def run(self, takers: Iterable[Taker], progress: Callable[[int], None]) -> None:
        """``progress`` hears how many requests are done."""
        takers = tuple(takers)
        for step in walk(self.columns, self.blocks):
            self.hits[step.first : step.end] = step.hits
            for taker in takers:
                taker.take(step)
            progress(step.end)
