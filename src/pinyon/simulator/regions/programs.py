"""What clients of a closed loop send: programs, whose requests go on with the answers of others.

A conversation is a chain of requests, a tree of thoughts has siblings that are sent at once (SkyWalker §5.1). A trace
with arrival times cannot say this: when a request is sent depends on when the one before it was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

__all__ = ["Program", "Source", "Step", "Text", "block_ids"]

BlockId = int
"""Names a block with all that comes before it: equal ids, equal text up to its end. From 0 to 2^63 - 1."""


class Step(NamedTuple):
    """One request of a program."""

    after: int
    """The step whose end it waits for, by its place in the program, before its own; -1: it is sent at once."""
    tokens: int
    """Of its prompt."""
    output_tokens: int
    blocks: tuple[BlockId, ...]
    """Of the prompt, the full ones."""
    answer: tuple[BlockId, ...]
    """Of blocks that the answer fills, the one that it shares with the prompt's end being the first."""
    think_s: float = 0.0
    """Between that end and its own beginning."""


class Program(NamedTuple):
    user: str
    """By whom, or by which session, consistent hashing goes."""
    steps: tuple[Step, ...]


class Source(Protocol):
    """Where the clients of a region have their programs from."""

    def program(self, rng: Random) -> Program: ...


def block_ids(rng: Random) -> Callable[[int], tuple[BlockId, ...]]:
    """What makes so many ids that nothing else has."""

    def fresh(count: int) -> tuple[BlockId, ...]:
        return tuple(rng.getrandbits(63) for _ in range(count))

    return fresh


@dataclass(frozen=True, slots=True)
class Text:
    """``tokens`` of them, and the ids of its full blocks."""

    tokens: int = 0
    blocks: tuple[BlockId, ...] = ()

    def extended(self, tokens: int, block_tokens: int, fresh: Callable[[int], Sequence[BlockId]]) -> Text:
        """With so many more, which nobody else has."""
        more = self.tokens + tokens
        return Text(more, (*self.blocks, *fresh(more // block_tokens - len(self.blocks))))
