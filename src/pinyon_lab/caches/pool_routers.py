"""Which node a request of a replayed pool runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Router(Protocol):
    def route(self, blocks: int, longest: int, holders: int, asked: Sequence[int]) -> int:
        """The node for a request of so many ``blocks``.

        Args:
            longest: blocks of its longest leading run that is resident on one node
            holders: bit n: node n has that run; all bits where there is none
            asked: blocks of the requests that ran on each node so far: its load
        """
        ...


class RoundRobin:
    """All in turn."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, blocks: int, longest: int, holders: int, asked: Sequence[int]) -> int:
        node = self._next
        self._next = (node + 1) % len(asked)
        return node


@dataclass(frozen=True, slots=True)
class Affinity:
    """``min_share``: of the request's blocks, for a run to count; in [0, 1]."""

    min_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share must be from 0 to 1, got {self.min_share}")


class CacheAffinity:
    """The node with the longest leading run; of equal ones the one with the least load, then the lowest number.

    Where all requests begin alike, one node has the longest run of all that is new: ``min_share`` sends to the least
    load what hits less than that.
    """

    def __init__(self, settings: Affinity) -> None:
        self._min_share = settings.min_share

    def route(self, blocks: int, longest: int, holders: int, asked: Sequence[int]) -> int:
        if longest < self._min_share * blocks:
            holders = -1
        return min((node for node in range(len(asked)) if holders >> node & 1), key=asked.__getitem__)
