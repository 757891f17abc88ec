"""Requests of a trace in the form in which a simulated cluster gets them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pinyon.core.block_keys import KEY_BYTES, BlockKey, pack_keys
from pinyon.core.errors import InvalidArgument
from pinyon.eviction import Traits
from pinyon_lab.traces import TraceRow


class Arrival(NamedTuple):
    time_s: float
    tokens: int
    """The length of the prompt."""
    output_tokens: int
    blocks: tuple[int, ...]
    """The ids of the prompt's blocks; the last block may not be full."""
    traits: Traits
    follows: int = -1
    """The index of the request whose end the client awaits before it sends this one; -1: none."""


def cut(rows: Iterable[TraceRow], block_tokens: int, tokens_max: int) -> list[Arrival]:
    """Returns the requests in order of time, with prompts cut to their first ``tokens_max`` tokens. Rows without a
    prompt are left out, and so are block ids beyond a prompt's end."""
    places: dict[str, int] = {}
    """The index of each request by its own name, and of the last request of each conversation by the conversation's."""
    arrivals = []
    for row in rows:
        if row.input_tokens < 1:
            continue
        tokens = min(row.input_tokens, tokens_max)
        before = row.parent or (row.chat if row.turn != 1 else "")
        blocks, traits = row.blocks[: -(-tokens // block_tokens)], Traits(row.category, row.user)
        follows = places.get(before, -1) if before else -1
        arrivals.append(Arrival(row.time_s, tokens, row.output_tokens, blocks, traits, follows))
        if row.chat:
            places[row.chat] = len(arrivals) - 1
    return arrivals


def shrunk(arrivals: Sequence[Arrival], factor: int) -> list[Arrival]:
    """Returns the requests with all lengths divided by ``factor`` and rounded up. Block ids stay, so that each block
    has fewer tokens. The shape of a trace thus suits a model with a short context."""
    return [
        each._replace(tokens=-(-each.tokens // factor), output_tokens=-(-each.output_tokens // factor))
        for each in arrivals
    ]


def answers(arrivals: Sequence[Arrival], block_tokens: int) -> dict[int, tuple[int, ...]]:
    """Returns the ids of the blocks that each answer fills, by the index of its request. They come from the first
    request that continues the whole of that request's prompt."""
    found: dict[int, tuple[int, ...]] = {}
    for arrival in arrivals:
        if arrival.follows < 0 or arrival.follows in found:
            continue
        before = arrivals[arrival.follows]
        whole, end = before.tokens // block_tokens, (before.tokens + before.output_tokens - 1) // block_tokens
        if arrival.blocks[:whole] == before.blocks[:whole]:
            found[arrival.follows] = arrival.blocks[whole : min(end, arrival.tokens // block_tokens)]
    return found


def native_rate(arrivals: Sequence[Arrival]) -> float:
    """Returns the requests per second from first to last. Raises :class:`InvalidArgument` if all come at one time."""
    span_s = arrivals[-1].time_s - arrivals[0].time_s if arrivals else 0.0
    if span_s <= 0:
        raise InvalidArgument("a trace of requests that all come at one time has no rate", field="trace")
    return len(arrivals) / span_s


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Returns the requests from 0 s on, with all times scaled alike to a mean of ``rate`` requests per second."""
    scale, first_s = native_rate(arrivals) / rate, arrivals[0].time_s
    return [each._replace(time_s=(each.time_s - first_s) * scale) for each in arrivals]


def one_by_one(arrivals: Sequence[Arrival], gap_s: float) -> list[Arrival]:
    """Returns the requests in their order, each ``gap_s`` after the one before. With a long gap, no request waits."""
    return [each._replace(time_s=number * gap_s) for number, each in enumerate(arrivals)]


def key_of(block: int) -> BlockKey:
    return block.to_bytes(KEY_BYTES, "little", signed=True)


def ids_of(keys: Iterable[BlockKey]) -> list[int]:
    return [int.from_bytes(key, "little", signed=True) for key in keys]


def packed(blocks: Iterable[int]) -> bytes:
    """Returns the keys of blocks, given by id, as bytes."""
    return pack_keys([*map(key_of, blocks)])
