"""Programs that clients of a closed loop send, whose requests continue the answers to others.

A conversation is a chain of requests; a tree of thoughts has siblings that are sent at once (SkyWalker §5.1). A trace
with arrival times cannot express this: a request is sent only after the one before it was answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from pinyon.core.block_keys import KEY_BYTES, BlockKey
from pinyon.routing.routing_keys import KEY_BYTES as ROUTING_KEY_BYTES
from pinyon_lab.simulator.regions.settings import BLOCK_TOKENS

_REST = bytes(KEY_BYTES - ROUTING_KEY_BYTES)

Fresh = Callable[[int], tuple[BlockKey, ...]]
"""A function that makes the keys of so many blocks, each of which is unique."""


class ProgramStep(NamedTuple):
    """One request of a program. A block's key stands for the block and for all that precedes it."""

    after: int
    """The index of an earlier step of the program, whose end this step awaits; -1: it is sent at once."""
    tokens: int
    """The length of the prompt."""
    output_tokens: int
    keys: tuple[BlockKey, ...]
    """The keys of the prompt's full blocks."""
    answer: tuple[BlockKey, ...]
    """The keys of the blocks that the answer fills; the first may begin with the end of the prompt."""


class Program(NamedTuple):
    user: str
    """The user or session by which consistent hashing chooses."""
    steps: tuple[ProgramStep, ...]


class RegionProgramSource(Protocol):
    """A source of programs for the clients of a region."""

    def program(self, rng: Random) -> Program: ...


def fresh_keys(rng: Random) -> Fresh:
    """Returns a function that makes random keys. A block key is a routing key and zeros: each gives the other."""

    def fresh(count: int) -> tuple[BlockKey, ...]:
        data = rng.randbytes(count * ROUTING_KEY_BYTES)
        return tuple([data[at : at + ROUTING_KEY_BYTES] + _REST for at in range(0, len(data), ROUTING_KEY_BYTES)])

    return fresh


def routing_keys(keys: tuple[BlockKey, ...]) -> bytes:
    """Returns the routing keys that a load balancer computes for the same prompt. Its chunks are the blocks."""
    return b"".join([key[:ROUTING_KEY_BYTES] for key in keys])


def block_keys(keys: bytes) -> list[BlockKey]:
    """Returns the block keys of routing keys."""
    return [keys[at : at + ROUTING_KEY_BYTES] + _REST for at in range(0, len(keys), ROUTING_KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class Text:
    """The number of tokens of a text, and the keys of its full blocks."""

    tokens: int = 0
    keys: tuple[BlockKey, ...] = ()

    def extended(self, tokens: int, fresh: Fresh) -> Text:
        """Returns the text with ``tokens`` more, which no other text has."""
        more = self.tokens + tokens
        return Text(more, (*self.keys, *fresh(more // BLOCK_TOKENS - len(self.keys))))
