"""A recorded trace through the books of one worker that serves one request at a time.

It leaves out less than `pinyon simulate-cache`. A block that is not full is not kept, and the last token is always
computed. Computed blocks need room before they are kept, and generated blocks are kept as well."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pinyon.core.trace_hashes import BLOCK_TOKENS
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.paging import BlockPool, LeaseTable, Reservations
from pinyon_lab.traces import TraceRow

KEY_BYTES = 16


def worker_hits(rows: Sequence[TraceRow], choice: str, capacity: int) -> list[int]:
    """Returns the number of blocks that each request finds, in this order. Raises ``ValueError`` for an unknown policy,
    RuntimeError for a request that has no room."""
    books = Reservations(BlockPool(capacity, EVICTION_POLICIES.make(choice)), LeaseTable())
    hits = []
    for row, keys in zip(rows, _kept(rows), strict=True):
        traits, now_s = Traits(row.category, row.user), row.time_s
        whole, computed = row.input_tokens // BLOCK_TOKENS, row.input_tokens + row.output_tokens - 1
        reservation = books.reserve(keys[: (row.input_tokens - 1) // BLOCK_TOKENS], len(row.blocks), now_s, traits)
        more = books.grow(-(-computed // BLOCK_TOKENS) - len(row.blocks), now_s)
        if reservation is None or more is None:
            raise RuntimeError(f"{capacity} blocks are no room for {computed} tokens")
        hits.append(reservation.held)
        table = reservation.table + more
        for first, end in ((reservation.held, whole), *((place, place + 1) for place in range(whole, len(keys)))):
            after = keys[first - 1] if first else None
            for index, block in books.publish(table[first:end], keys[first:end], now_s, traits, first, after):
                books.release((table[first + index],), now_s)
                table[first + index] = block
        books.release(table, now_s)
    return hits


def _kept(rows: Sequence[TraceRow]) -> Iterable[list[bytes]]:
    """Yields the keys of the blocks that each request fills. Blocks of its answer have the ids that the next turn's
    prompt tells, or ids that no other request has."""
    following = {row.parent: row for row in rows if row.parent}
    others = itertools.count(-1, -1)
    for row in rows:
        whole = row.input_tokens // BLOCK_TOKENS
        end = (row.input_tokens + row.output_tokens - 1) // BLOCK_TOKENS
        later = following.get(row.chat)
        told = row.blocks[:whole] if later is None else later.blocks[:end]
        ids = [*told, *itertools.islice(others, end - len(told))]
        yield [block.to_bytes(KEY_BYTES, "big", signed=True) for block in ids]
