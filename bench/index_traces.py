"""The part of the reusable tokens that a block index still sees if it knows one key in so many.

A request reuses the longest beginning that any request before it had. An index that is told of every so many blocks
sees it up to the last block that it knows. The same is computed for blocks that are chosen by their keys' hashes: one
in as many on average, with nothing known of their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pinyon_lab.traces import FORMATS, TraceFile, TraceRow
from pinyon_lab.traces.generate import generate, profile

EVERY = (1, 2, 4, 8, 16, 32, 64)
BLOCK_TOKENS = 16
"""Traces with longer blocks are cut into blocks of this size. Prompts then share whole blocks more often than they
would, since it is only known which longer blocks they share."""


class Source(NamedTuple):
    """The source of requests: a trace file, or the name of a profile that makes them."""

    name: str
    path: Path | None = None

    def rows(self, limit: int, seed: int) -> tuple[Iterator[TraceRow], int]:
        """Returns the rows, and the number of tokens in their blocks."""
        if self.path is not None:
            trace = TraceFile(self.path)
            return trace.rows(limit), trace.format.block_tokens
        made = profile(self.name)
        return islice(generate(made, seed), limit), FORMATS[made.format].block_tokens


@dataclass
class Seen:
    """Tokens of all prompts, those that could be reused, and those that an index with one key in so many sees."""

    prompts: int = 0
    reusable: int = 0
    hits: int = 0
    """The number of prompts with something to reuse."""
    by_place: dict[int, int] = field(default_factory=lambda: dict.fromkeys(EVERY, 0))
    by_hash: dict[int, int] = field(default_factory=lambda: dict.fromkeys(EVERY, 0))

    def percent(self, tokens: int) -> float:
        return round(100 * tokens / max(1, self.reusable), 2)

    def lost_points(self, tokens: int) -> float:
        """Returns the points of hit ratio that are lost."""
        return round(100 * (self.reusable - tokens) / max(1, self.prompts), 2)


def seen(rows: Iterable[TraceRow], block_tokens: int) -> Seen:
    """Returns the tokens that are seen, with a cache that keeps everything."""
    cut = max(1, block_tokens // BLOCK_TOKENS)
    tokens = block_tokens // cut
    known: set[int] = set()
    found = Seen()
    for row in rows:
        blocks = [block * cut + part for block in row.blocks for part in range(cut)][: row.input_tokens // tokens]
        shared = next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
        shared = min(shared, max(0, row.input_tokens - 1) // tokens)  # the last token is always computed
        known.update(blocks)
        found.prompts += row.input_tokens
        found.reusable += shared * tokens
        found.hits += shared > 0
        last = dict.fromkeys(EVERY, 0)
        for at, block in enumerate(blocks[:shared], 1):
            draw = xxh3_64_intdigest(block.to_bytes(16, "little", signed=True))
            for every in EVERY:
                if draw % every:
                    break
                last[every] = at
        for every in EVERY:
            found.by_place[every] += shared // every * every * tokens
            found.by_hash[every] += last[every] * tokens
    return found
