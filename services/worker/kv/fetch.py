"""Reused KV from other instances and the store, as far as it arrives in time.

Whatever does not come is computed: a source that is gone, evicted a block or is slow costs at most the time limit.
One that failed is not asked for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, PinyonError
from pinyon.core.fetch_span import FetchSpan, KvSource
from pinyon.core.layout import KvLayout
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.store.reader import Mover, ReadResult
from pinyon.transfer import Region, TransferEngine
from services.worker.abort import Abort
from services.worker.kv.arrivals import LayerArrivals
from services.worker.orders import PrefillOrder

__all__ = ["BlockSource", "Fetched", "Fetcher", "LayeredFetch"]

_log = get_logger("fetch")


class BlockSource(Protocol):
    """What reads leased blocks of another process: :class:`pinyon.store.reader.BlockReader`."""

    async def read(
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
        arrivals: Mover | None = None,
        request_class: RequestClass = UNKNOWN_CLASS,
    ) -> ReadResult:
        """Leading blocks that arrived whole, and whether the source did its part; ``arrivals`` moves them, if given.

        When it returns or raises, nothing writes to the region any more.
        """
        ...


class LayeredFetch:
    """The last span, still arriving: ``blocks`` are on their way, and ``reading`` ends when they are all here."""

    def __init__(
        self,
        address: str,
        offered_s: float,
        blocks: int,
        arrivals: LayerArrivals,
        reading: asyncio.Task[int],
        clock: Clock,
        start_s: float,
    ) -> None:
        self.address = address
        self.offered_s = offered_s
        self.blocks = blocks
        self.arrivals = arrivals
        self.reading = reading
        self.seconds = 0.0
        """How long all of the fetch took; known when ``reading`` is done."""

        def ended(_: object) -> None:
            self.seconds = clock() - start_s

        reading.add_done_callback(ended)

    @property
    def came(self) -> bool:
        """All blocks are here and valid. Only to be asked when ``reading`` is done."""
        reading = self.reading
        return not reading.cancelled() and reading.exception() is None and reading.result() >= self.blocks

    async def stop(self) -> None:
        """On return nothing writes to the blocks any more."""
        self.reading.cancel()
        await asyncio.wait((self.reading,))


@dataclass(slots=True)
class Fetched:
    """Leading blocks that arrived, by where they came from, and the time it took until computing could begin.

    With ``layered``, the last blocks counted here are still arriving.
    """

    peer_blocks: int = 0
    store_blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    layered: LayeredFetch | None = None

    @property
    def blocks(self) -> int:
        return self.peer_blocks + self.store_blocks


class Fetcher:
    """Reads into this worker's pool. ``layers`` moves a prompt's last span layer by layer, if given."""

    def __init__(
        self,
        source: BlockSource,
        region: Region,
        layout: KvLayout,
        clock: Clock,
        timeout_s: float,
        layers: TransferEngine | None = None,
    ) -> None:
        self._source = source
        self._region = region
        self._layout = layout
        self._clock = clock
        self._timeout_s = timeout_s
        self._layers = layers
        self._avoidance = Avoidance()
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

        Raises what ``abort`` was fired with; nothing else. Nothing is under way then.
        """
        fetched = Fetched()
        start_s = self._clock()
        for span in order.fetches:
            at, end = first + fetched.blocks, min(span.end, len(keys))
            if at >= end or self._avoidance.avoids(span.address, self._clock()):
                continue
            left_s = self._timeout_s - (self._clock() - start_s)
            if span.first > at or left_s <= 0:
                break
            offsets = [block * self._layout.block_bytes for block in table[at:end]]
            arrivals = None
            if self._layers is not None and span is order.fetches[-1]:
                arrivals = LayerArrivals(self._layers, self._layout)
            reading = asyncio.ensure_future(
                self._read(span, keys[at:end], offsets, left_s, order, traceparent, arrivals)
            )
            arrived = await self._arrive(reading, arrivals, left_s, abort)
            if arrivals is not None and not reading.done():
                fetched.layered = LayeredFetch(span.address, left_s, arrived, arrivals, reading, self._clock, start_s)
            if span.source == KvSource.STORE:
                fetched.store_blocks += arrived
            else:
                fetched.peer_blocks += arrived
            if arrived < end - at:
                self.failures += 1
                break
        fetched.bytes = fetched.blocks * self._layout.block_bytes
        fetched.seconds = self._clock() - start_s
        return fetched

    def lost(self, layered: LayeredFetch) -> None:
        """Its layers did not all come, or came too late; :meth:`LayeredFetch.stop` it after this."""
        self.failures += 1
        late = DeadlineExceeded("a layer did not come")
        # A reading that is done was judged when it ended.
        if not layered.reading.done() and blames_peer(late, layered.offered_s, self._timeout_s):
            self._avoidance.failed(layered.address, self._clock())

    async def _arrive(
        self, reading: asyncio.Task[int], arrivals: LayerArrivals | None, left_s: float, abort: Abort
    ) -> int:
        """Blocks that arrived; or, while ``reading`` goes on, blocks whose first layer did."""
        first: set[asyncio.Future[int]] = {reading} if arrivals is None else {reading, arrivals.first_layer}
        waited = asyncio.ensure_future(asyncio.wait(first, timeout=left_s + 1.0, return_when=asyncio.FIRST_COMPLETED))
        under_way = False
        try:
            await abort.wait(waited)
            if reading.done():
                return reading.result()
            if arrivals is not None and arrivals.first_layer.done():
                under_way = True
                return arrivals.first_layer.result()
            return 0
        finally:
            waited.cancel()
            if not under_way:
                reading.cancel()
                await asyncio.wait((reading,))

    async def _read(
        self,
        span: FetchSpan,
        keys: Sequence[BlockKey],
        offsets: Sequence[int],
        timeout_s: float,
        order: PrefillOrder,
        traceparent: str,
        arrivals: Mover | None,
    ) -> int:
        """Leading blocks that arrived, whatever goes wrong."""
        arrived = 0
        asked_s = self._clock()
        try:
            result = await self._source.read(
                span.address,
                keys,
                self._region,
                offsets,
                self._layout.block_bytes,
                timeout_s,
                request_id=order.request_id,
                traceparent=traceparent,
                arrivals=arrivals,
                request_class=order.request_class,
            )
            arrived = result.leading
            result.raise_for_failure()
            if result.worked:
                self._avoidance.succeeded(span.address, asked_s)
        except PinyonError as error:
            if blames_peer(error, timeout_s, self._timeout_s):
                self._avoidance.failed(span.address, self._clock())
            _log.info(
                "fetching from %s failed: %s", span.source_id, error.message, extra={"request_id": order.request_id}
            )
        except Exception:
            _log.exception("fetching from %s failed", span.source_id, extra={"request_id": order.request_id})
        return arrived
