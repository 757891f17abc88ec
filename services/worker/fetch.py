"""Reused KV from other instances and the store, as far as it arrives in time.

Whatever does not come is computed: a source that is gone, evicted a block or is slow costs at most the time limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pinyon.api.common.v1 import common_pb2
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.layout import KvLayout
from pinyon.runtime.logging import get_logger
from pinyon.transfer import Region
from services.worker.abort import Abort
from services.worker.orders import PrefillOrder

__all__ = ["BlockSource", "Fetched", "Fetcher"]

_log = get_logger("fetch")


class BlockSource(Protocol):
    """What reads leased blocks of another process: :class:`pinyon.store.reader.BlockReader`."""

    async def fetch(
        self,
        address: str,
        keys: Sequence[BlockKey],
        region: Region,
        offsets: Sequence[int],
        block_bytes: int,
        timeout_s: float,
        *,
        request_id: str = "",
        traceparent: str = "",
    ) -> int:
        """Leading blocks that arrived whole. When it returns or raises, nothing writes to the region any more."""
        ...


@dataclass(slots=True)
class Fetched:
    """Leading blocks that arrived, by where they came from, and the time it took."""

    peer_blocks: int = 0
    store_blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def blocks(self) -> int:
        return self.peer_blocks + self.store_blocks


class Fetcher:
    """Reads into this worker's pool."""

    def __init__(self, source: BlockSource, region: Region, layout: KvLayout, clock: Clock, timeout_s: float) -> None:
        self._source = source
        self._region = region
        self._layout = layout
        self._clock = clock
        self._timeout_s = timeout_s
        self.failures = 0
        """Spans of which not everything arrived."""

    async def fetch(
        self,
        order: PrefillOrder,
        keys: Sequence[BlockKey],
        table: Sequence[int],
        first: int,
        abort: Abort,
        traceparent: str,
    ) -> Fetched:
        """Blocks from ``first`` on without a gap, into the blocks of ``table``, as the order's spans name them.

        Raises what ``abort`` was fired with; nothing else.
        """
        fetched = Fetched()
        start_s = self._clock()
        for span in order.fetches:
            at, end = first + fetched.blocks, min(span.end, len(keys))
            if at >= end:
                continue
            left_s = self._timeout_s - (self._clock() - start_s)
            if span.first > at or left_s <= 0:
                break
            offsets = [block * self._layout.block_bytes for block in table[at:end]]
            arrived = 0
            try:
                arrived = await abort.run(
                    self._source.fetch(
                        span.address,
                        keys[at:end],
                        self._region,
                        offsets,
                        self._layout.block_bytes,
                        left_s,
                        request_id=order.request_id,
                        traceparent=traceparent,
                    ),
                    left_s + 1.0,
                )
            except PinyonError as error:
                abort.check()
                _log.info(
                    "fetching from %s failed: %s", span.source_id, error.message, extra={"request_id": order.request_id}
                )
            except Exception:
                _log.exception("fetching from %s failed", span.source_id, extra={"request_id": order.request_id})
            if span.source == common_pb2.KV_SOURCE_STORE:
                fetched.store_blocks += arrived
            else:
                fetched.peer_blocks += arrived
            if arrived < end - at:
                self.failures += 1
                break
        fetched.bytes = fetched.blocks * self._layout.block_bytes
        fetched.seconds = self._clock() - start_s
        return fetched
