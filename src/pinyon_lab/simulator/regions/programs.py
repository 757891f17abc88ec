"""What clients of a closed loop send: programs, whose requests go on with the answers of others.

A conversation is a chain of requests, a tree of thoughts has siblings that are sent at once (SkyWalker §5.1). A trace
with arrival times cannot say this: when a request is sent depends on when the one before it was answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from pinyon.core.block_keys import KEY_BYTES, BlockKey
from pinyon.routing.routing_keys import KEY_BYTES as ROUTING_KEY_BYTES

_REST = bytes(KEY_BYTES - ROUTING_KEY_BYTES)

Fresh = Callable[[int], tuple[BlockKey, ...]]
"""Makes keys of so many blocks that nothing else has."""


class Step(NamedTuple):
    """One request of a program. A block's key stands for it and for all that comes before it."""

    after: int
    """The step whose end it waits for, by its place in the program, before its own; -1: it is sent at once."""
    tokens: int
    """Of its prompt."""
    output_tokens: int
    keys: tuple[BlockKey, ...]
    """Of the prompt's full blocks."""
    answer: tuple[BlockKey, ...]
    """Of the blocks that the answer fills, the first of which may begin with the end of the prompt."""
    think_s: float = 0.0
    """Between that end and its own beginning."""


class Program(NamedTuple):
    user: str
    """By whom, or by which session, consistent hashing goes."""
    steps: tuple[Step, ...]


class Source(Protocol):
    """Where the clients of a region have their programs from."""

    def program(self, rng: Random) -> Program: ...


def fresh_keys(rng: Random) -> Fresh:
    """By chance. A block key is a routing key and zeros, so that one tells the other."""

    def fresh(count: int) -> tuple[BlockKey, ...]:
        data = rng.randbytes(count * ROUTING_KEY_BYTES)
        return tuple([data[at : at + ROUTING_KEY_BYTES] + _REST for at in range(0, len(data), ROUTING_KEY_BYTES)])

    return fresh


def routing_keys(keys: tuple[BlockKey, ...]) -> bytes:
    """What a load balancer makes of the same prompt. Its chunks are the blocks."""
    return b"".join([key[:ROUTING_KEY_BYTES] for key in keys])


def block_keys(keys: bytes) -> list[BlockKey]:
    """The other way round."""
    return [keys[at : at + ROUTING_KEY_BYTES] + _REST for at in range(0, len(keys), ROUTING_KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class Text:
    """``tokens`` of them, and the keys of its full blocks."""

    tokens: int = 0
    keys: tuple[BlockKey, ...] = ()

    def extended(self, tokens: int, block_tokens: int, fresh: Fresh) -> Text:
        """With so many more, which nobody else has."""
        more = self.tokens + tokens
        return Text(more, (*self.keys, *fresh(more // block_tokens - len(self.keys))))
