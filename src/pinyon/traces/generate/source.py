"""What sources of requests have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol

__all__ = ["Ids", "Made", "Source", "chance_to_exponential", "chance_to_normal"]


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

    def name(self) -> str:
        self._name += 1
        return str(self._name)


class Made(NamedTuple):
    """A request, and when which one follows it."""

    input_tokens: int
    output_tokens: int
    blocks: list[int]
    kind: str
    turn: int
    chat: str
    parent: str
    user: int
    then_s: float
    then: Callable[[float, Random], Made] | None


class Source(Protocol):
    begins_per_request: float
    """How many beginnings there are for each request of the whole workload."""

    def begin(self, now_s: float, rng: Random) -> Made:
        """The first request of a series that begins now."""
        ...


def chance_to_exponential(chance: float, mean: float) -> float:
    """A chance in [0, 1) as a time of an exponential distribution."""
    return -mean * math.log(1.0 - chance)


def chance_to_normal(rng: Random) -> float:
    """Box-Muller, so that a seed means the same in every version of Python."""
    return math.sqrt(-2.0 * math.log(1.0 - rng.random())) * math.cos(2 * math.pi * rng.random())
