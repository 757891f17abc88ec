"""Spans of a prompt's blocks in the store: found, and read so that whatever goes wrong is blocks that did not come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.orders import FetchSpan, KvSource
from pinyon.runtime.logging import get_logger
from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import Pieces
from pinyon.store.reader import BlockReader, ReadTerms

_log = get_logger("store")


async def find_spans(
    client: StoreClient,
    keys: Sequence[BlockKey],
    object_bytes: int,
    timeout_s: float,
    first: int = 0,
    without: Collection[str] = (),
) -> tuple[FetchSpan, ...]:
    """Returns where the store has the leading ``keys``, without a gap, counted from block ``first`` on.

    Nodes at the addresses ``without`` are left out. A store that cannot be asked has nothing."""
    spans: list[FetchSpan] = []
    try:
        for node, count in await client.leading(keys, object_bytes, timeout_s, without):
            spans.append(FetchSpan(node.node_id, node.address, KvSource.STORE, first, first + count))
            first += count
    except PinyonError as error:
        _log.info("the KV store cannot be asked: %s", error.message)
    except Exception:
        _log.exception("asking the KV store failed")
    return tuple(spans)


async def read_span(
    reader: BlockReader,
    avoidance: Avoidance,
    clock: Clock,
    span: FetchSpan,
    keys: Sequence[BlockKey],
    places: Sequence[Pieces],
    object_bytes: int,
    timeout_s: float,
    whole_s: float,
    terms: ReadTerms,
    arrivals: Any = None,
) -> int:
    """Reads ``keys`` from the span's source into ``places``; returns how many leading blocks arrived.

    A source that fails is avoided, if ``timeout_s`` of the ``whole_s`` seconds for all spans are enough to blame it."""
    arrived, asked_s, about = 0, clock(), {"request_id": terms.request_id}
    try:
        result = await reader.read(span.address, keys, places, object_bytes, timeout_s, terms=terms, arrivals=arrivals)
        arrived = result.leading
        result.raise_for_failure()
        if arrived:  # a source whose bytes never come can still answer that it has nothing
            avoidance.succeeded(span.address, asked_s)
    except PinyonError as error:
        if blames_peer(error, timeout_s, whole_s):
            avoidance.failed(span.address, clock())
        _log.info("reading from %s failed: %s", span.source_id, error.message, extra=about)
    except Exception:
        _log.exception("reading from %s failed", span.source_id, extra=about)
    return arrived
