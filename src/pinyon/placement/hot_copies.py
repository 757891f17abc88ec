"""Copies of hot blocks at other store nodes, planned by what store nodes measure (Mooncake §4.2). Pure.

Each window, a node that is read much more than another one gets at most one order: so many reads are to go there. It
copies its hottest blocks. Readers take the copy that is read least, so a new one takes its share. What stays hot gets
more copies, and what cools gets no more. Nodes give up cold copies themselves, when they need the room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNEVEN = 2.0
"""A node must be read this many times as much as another one before it gives copies to it."""
FORGET_S = 15.0
"""The seconds without a report after which nothing goes to a node."""


class CopyOrder(NamedTuple):
    """An order to move so many of a window's reads to the node ``target``, by copies."""

    target: str
    reads: int


class HotCopies:
    """A planner of copies, which knows how much each store node was read lately."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[float, float]] = {}
        """Each node's reads per second, and the time of its report."""

    def plan(
        self, node_id: str, seconds: float, reads: int, hot_reads: int, others: Sequence[str], now_s: float
    ) -> CopyOrder | None:
        """Takes the reads of a window of ``seconds`` at a node, those of hot blocks among them.

        Returns how many are to move to which of the ``others``, or None if the load is even enough."""
        rate = reads / seconds
        self._rates = {name: known for name, known in self._rates.items() if now_s - known[1] < FORGET_S}
        self._rates[node_id] = rate, now_s
        known = [each for each in others if each in self._rates]
        if not known:
            return None
        least, target = min((self._rates[each][0], each) for each in known)
        moved = min((rate - least) / 2, hot_reads / seconds / 2)
        if rate < UNEVEN * least or moved * seconds < 1:
            return None
        # Until they report again: another node's order in the same window is to see what this one does.
        self._rates[target] = least + moved, now_s
        return CopyOrder(target, round(moved * seconds))
