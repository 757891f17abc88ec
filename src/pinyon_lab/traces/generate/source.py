"""What sources of requests have in common."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol


class Ids:
    """Names and block ids, none twice."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._block = 0
        self._name = 0

    def fresh(self, count: int) -> list[int]:
        first = self._block
        self._block += max(0, count)
        return list(range(first, self._block))

    def extended(self, kept: list[int], tokens: int) -> list[int]:
        """``kept`` and as many fresh ones as a prompt of that many tokens has beyond it."""
        return kept + self.fresh(-(-tokens // self.block_tokens) - len(kept))

    def name(self) -> str:
        self._name += 1
        return str(self._name)


class Made(NamedTuple):
    """A request, and what follows it."""

    input_tokens: int
    output_tokens: int
    blocks: list[int]
    kind: str
    turn: int
    chat: str
    parent: str
    user: int
    then_s: float = 0.0
    """When ``then`` makes the next one."""
    then: Then | None = None


Then = Callable[[float, Random], Made]
"""What goes on: makes a request at the time it is given."""


class Source(Protocol):
    begins_per_request: float
    """How many beginnings there are for each request of the whole workload."""

    def begin(self, now_s: float, rng: Random) -> Made:
        """The first request of a series that begins now."""
        ...
