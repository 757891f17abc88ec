"""Reused KV from other instances and the store, as far as it arrives in time.

Whatever does not come is computed: a source that is gone, evicted a block or is slow costs at most the time limit. One
that failed is not asked for a while, and the conductor is told not to plan it. After that while, one prompt asks it for
one block, with little time, before it is trusted with more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, PinyonError
from pinyon.core.fetch_span import FetchSpan, KvSource
from pinyon.core.key_sample import EVERY_MAX
from pinyon.core.layout import KvLayout
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.store.reader import Mover, ReadResult
from pinyon.transfer import Region, TransferEngine
from services.worker.kv.arrivals import LayerArrivals
from services.worker.kv.storage import ObjectStore
from services.worker.orders.abort import Abort
from services.worker.orders.order import PrefillOrder, SpanFetched

__all__ = ["BlockSource", "Fetched", "Fetcher", "LayeredFetch"]

MAX_PAUSE_S = 10.0
"""A trial costs little, so what came back is used again soon."""
TRIAL_S = 0.5
"""For the one block that a source which failed is asked for."""
RATE_MIN_BYTES_S = 1 << 30
"""A long prefix has so much more time than a short one. What comes slower than that is computed."""
OVERRUN_S = 1.0
"""A read that has not ended this long after its time is cancelled."""
REPORTED_SOURCES_MAX = 64
MEASURED_SPANS_MAX = 16
"""Of one fetch; the last ones."""

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
        first_block: int = 0,
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
        whole_s: float,
        blocks: int,
        arrivals: LayerArrivals,
        reading: asyncio.Task[int],
        clock: Clock,
        start_s: float,
        source_id: str,
        asked_s: float,
        size_bytes: int,
    ) -> None:
        """``start_s``: when all of the fetch began; ``asked_s``: when this span of ``size_bytes`` did. No bytes: it
        does not come whole, and tells nothing."""
        self.address = address
        self.offered_s = offered_s
        self.whole_s = whole_s
        self.blocks = blocks
        self.arrivals = arrivals
        self.reading = reading
        self.seconds = 0.0
        """How long all of the fetch took; known when ``reading`` is done."""
        self.span: SpanFetched | None = None
        """How long this span took, likewise."""

        def ended(_: object) -> None:
            self.seconds = clock() - start_s
            if size_bytes:
                self.span = SpanFetched(source_id, size_bytes, clock() - asked_s)

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

    ``bytes`` is what there is to learn about the speed from: 0 when something did not come. With ``layered``, the last
    blocks counted here are still arriving.
    """

    peer_blocks: int = 0
    store_blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    layered: LayeredFetch | None = None
    spans: list[SpanFetched] = field(default_factory=list)
    """Those that arrived whole, one read each."""

    def measured(self) -> tuple[SpanFetched, ...]:
        """The last spans, when all have arrived."""
        last = None if self.layered is None else self.layered.span
        return (*self.spans, *([] if last is None else [last]))[-MEASURED_SPANS_MAX:]

    @property
    def blocks(self) -> int:
        return self.peer_blocks + self.store_blocks

    def count(self, source: KvSource, blocks: int) -> None:
        if source == KvSource.STORE:
            self.store_blocks += blocks
        else:
            self.peer_blocks += blocks


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
        store: ObjectStore | None = None,
    ) -> None:
        """``store`` is asked for what nobody has planned."""
        self._source = source
        self._region = region
        self._layout = layout
        self._clock = clock
        self._timeout_s = timeout_s
        self._layers = layers
        self._store = store
        self._avoidance = Avoidance(max_s=MAX_PAUSE_S)
        self._tried: set[str] = set()
        """Addresses of sources that a trial is under way to."""
        self.failures = 0
        """Spans of which not everything arrived."""

    def failed_sources(self) -> list[str]:
        """Addresses of the sources that are left alone now: those that failed last, if they are many."""
        return self._avoidance.avoided(self._clock())[-REPORTED_SOURCES_MAX:]

    async def fetch(
        self,
        order: PrefillOrder,
        keys: Sequence[BlockKey],
        table: Sequence[int],
        first: int,
        abort: Abort,
        traceparent: str,
    ) -> Fetched:
        """Blocks from ``first`` on without a gap, into the blocks of ``table``, as the order's spans name them, or, if
        nobody has planned any, from where the store has them.

        The conductor knows of a block in so many only (:mod:`pinyon.core.key_sample`), so it is not sure where the
        source of the next span takes over: who is asked for a span is asked for the first blocks of the next one too.

        Raises what ``abort`` was fired with; nothing else. Nothing is under way then.
        """
        fetched = Fetched()
        failures, start_s = self.failures, self._clock()
        spans = order.fetches
        if order.ask_store and self._store is not None:
            looking = asyncio.ensure_future(self._look_up(self._store, keys, first))
            try:
                spans = await abort.wait(looking)
            finally:
                looking.cancel()
        whole_s = self._whole_s(spans, first, len(keys))
        for span, after in zip_longest(spans, spans[1:]):
            at, end = first + fetched.blocks, min(span.end, len(keys))
            if at >= end or self._avoidance.avoids(span.address, self._clock()) or span.address in self._tried:
                continue
            left_s = whole_s - (self._clock() - start_s)
            if span.first > at or left_s <= 0:
                break
            if span.address in self._avoidance:
                left_s = min(left_s, TRIAL_S)
                tried = await self._try(span, keys[at], table[at], left_s, order, abort, traceparent)
                fetched.count(span.source, tried)
                at += tried
                left_s = whole_s - (self._clock() - start_s)
                if not tried:
                    self.failures += 1
                if not tried or at == end or left_s <= 0:
                    continue
            asked = end if after is None else min(after.end, end + EVERY_MAX - 1, len(keys))
            offsets = [block * self._layout.block_bytes for block in table[at:asked]]
            arrivals, asked_s = None, self._clock()
            if self._layers is not None and after is None:
                arrivals = LayerArrivals(self._layers, self._layout)
            reading = asyncio.ensure_future(
                self._read(span, keys[at:asked], offsets, left_s, whole_s, order, traceparent, arrivals, at)
            )
            arrived = await self._arrive(span.address, reading, arrivals, left_s, abort)
            size = arrived * self._layout.block_bytes if arrived >= end - at else 0
            if arrivals is not None and not reading.done():
                fetched.layered = LayeredFetch(
                    span.address, left_s, whole_s, arrived, arrivals, reading, self._clock, start_s,
                    span.source_id, asked_s, size,
                )  # fmt: skip
            fetched.count(span.source, arrived)
            if arrived < end - at:
                self.failures += 1
                break
            if fetched.layered is None:
                fetched.spans.append(SpanFetched(span.source_id, size, self._clock() - asked_s))
        if failures == self.failures:  # else the time says nothing about the bytes
            fetched.bytes = fetched.blocks * self._layout.block_bytes
        fetched.seconds = self._clock() - start_s
        return fetched

    async def _look_up(self, store: ObjectStore, keys: Sequence[BlockKey], first: int) -> tuple[FetchSpan, ...]:
        """What the store has from block ``first`` on. It has the time of a fetch; Redis is given up sooner."""
        spans: list[FetchSpan] = []
        try:
            for node, count in await store.leading(keys[first:], self._layout.block_bytes, self._timeout_s):
                spans.append(FetchSpan(node.node_id, node.address, KvSource.STORE, first, first + count))
                first += count
        except PinyonError as error:
            _log.info("the KV store cannot be asked: %s", error.message)
        except Exception:
            _log.exception("asking the KV store failed")
        return tuple(spans)

    def _whole_s(self, spans: Sequence[FetchSpan], first: int, end: int) -> float:
        """For all spans: a source that fails is found out soon, and a long prefix has the time that it takes."""
        blocks = max((min(span.end, end) - first for span in spans), default=0)
        return self._timeout_s + max(0, blocks) * self._layout.block_bytes / RATE_MIN_BYTES_S

    async def _try(
        self,
        span: FetchSpan,
        key: BlockKey,
        block: int,
        timeout_s: float,
        order: PrefillOrder,
        abort: Abort,
        traceparent: str,
    ) -> int:
        """Whether one block arrived of a source that failed when it was asked last; others leave it alone meanwhile."""
        offsets = [block * self._layout.block_bytes]
        self._tried.add(span.address)
        try:
            reading = asyncio.ensure_future(
                self._read(span, [key], offsets, timeout_s, TRIAL_S, order, traceparent, None)
            )
            return await self._arrive(span.address, reading, None, timeout_s, abort)
        finally:
            self._tried.discard(span.address)

    def lost(self, layered: LayeredFetch) -> None:
        """Its layers did not all come, or came too late; :meth:`LayeredFetch.stop` it after this."""
        self.failures += 1
        late = DeadlineExceeded("a layer did not come")
        # A reading that is done was judged when it ended.
        if not layered.reading.done() and blames_peer(late, layered.offered_s, layered.whole_s):
            self._avoidance.failed(layered.address, self._clock())

    async def _arrive(
        self, address: str, reading: asyncio.Task[int], arrivals: LayerArrivals | None, left_s: float, abort: Abort
    ) -> int:
        """Blocks that arrived; or, while ``reading`` goes on, blocks whose first layer did."""
        first: set[asyncio.Future[int]] = {reading} if arrivals is None else {reading, arrivals.first_layer}
        waited = asyncio.ensure_future(
            asyncio.wait(first, timeout=left_s + OVERRUN_S, return_when=asyncio.FIRST_COMPLETED)
        )
        under_way = False
        try:
            await abort.wait(waited)
            if reading.done():
                return reading.result()
            if arrivals is not None and arrivals.first_layer.done():
                under_way = True
                return arrivals.first_layer.result()
            self._avoidance.failed(address, self._clock())  # it did not even keep to its time
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
        whole_s: float,
        order: PrefillOrder,
        traceparent: str,
        arrivals: Mover | None,
        first_block: int = 0,
    ) -> int:
        """Leading blocks that arrived, whatever goes wrong. It is offered ``timeout_s`` out of ``whole_s`` seconds."""
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
                first_block=first_block,
            )
            arrived = result.leading
            result.raise_for_failure()
            if arrived:  # that something is not there, one may learn from a source whose bytes never come
                self._avoidance.succeeded(span.address, asked_s)
        except PinyonError as error:
            if blames_peer(error, timeout_s, whole_s):
                self._avoidance.failed(span.address, self._clock())
            _log.info(
                "fetching from %s failed: %s", span.source_id, error.message, extra={"request_id": order.request_id}
            )
        except Exception:
            _log.exception("fetching from %s failed", span.source_id, extra={"request_id": order.request_id})
        return arrived
