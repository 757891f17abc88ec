"""Reused KV from other instances and the store, as far as it arrives in time.

KV that does not come is computed: a source that is gone, has evicted a block or is slow costs at most the time limit. A
source that failed is not asked for a while, and the conductor is told not to plan it. After that while, one prompt asks
it for one block, with little time, before it is trusted with more."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded
from pinyon.core.key_sample import EVERY_MAX
from pinyon.core.layout import KvLayout
from pinyon.core.orders import FetchSpan, KvSource, PrefillOrder
from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import KvMemory
from pinyon.store.reader import BlockReader, ReadTerms
from pinyon.store.spans import find_spans, read_span
from pinyon.transfer import TransferEngine
from services.worker.kv.arrivals import LayerArrivals
from services.worker.orders.abort import Abort
from services.worker.orders.limits import WorkerLimits

MAX_PAUSE_S = 10.0
"""The longest pause in s after failures. A trial costs little, so a source that came back is soon used again."""
TRIAL_S = 0.5
"""The time in s for the one block of a trial."""
RATE_MIN_BYTES_S = 1 << 30
"""The slowest useful rate: a longer prefix has more time by it, and slower KV is computed."""
OVERRUN_S = 1.0
"""The time in s after its limit at which a read that has not ended is cancelled."""
REPORTED_SOURCES_MAX = 64
MEASURED_SPANS_MAX = 16
"""The number of last spans of a fetch that are measured."""


@dataclass(eq=False, slots=True)
class SpanRead:
    """A span requested from its source at ``asked_s``, and offered ``offered_s`` of ``whole_s`` seconds."""

    span: FetchSpan
    offered_s: float
    whole_s: float
    asked_s: float
    arrivals: LayerArrivals | None = None
    """The arrivals of its layers, if it may come layer by layer."""
    blocks: int = 0
    """The number of blocks that arrived; while the read goes on, those on their way."""
    nbytes: int = 0
    """The bytes of the whole span; 0: it did not come whole, and tells nothing of the source's speed."""
    ended_s: float = 0.0
    reading: asyncio.Task[int] = field(init=False)

    @property
    def came(self) -> bool:
        """All blocks are here and valid. Only to be asked when ``reading`` is done."""
        reading = self.reading
        return not reading.cancelled() and reading.exception() is None and reading.result() >= self.blocks

    async def stop(self) -> None:
        """Cancels the read: on return nothing writes to the blocks any more."""
        self.reading.cancel()
        await asyncio.wait((self.reading,))


@dataclass(slots=True)
class Fetched:
    """The leading blocks that arrived, by source, and the time until computing could begin.

    Speeds are learned from ``bytes``, which is 0 when something did not come. With ``layered``, the last blocks counted
    here are still arriving: all of that span's are on their way."""

    start_s: float = 0.0
    peer_blocks: int = 0
    store_blocks: int = 0
    bytes: int = 0
    begun_s: float = 0.0
    layered: SpanRead | None = None
    spans: list[SpanRead] = field(default_factory=list)
    """Spans requested whole; the last ones that came whole are measured."""

    @property
    def seconds(self) -> float:
        """The time of the whole fetch; with ``layered``, known when its reading is done."""
        return (self.begun_s if self.layered is None else self.layered.ended_s) - self.start_s

    def measured(self) -> list[conductor_pb2.FetchMeasurement]:
        """Returns the last spans that came whole, one read each, when all have arrived."""
        return [
            conductor_pb2.FetchMeasurement(
                source_id=read.span.source_id,
                fetched_bytes=read.nbytes,
                fetch_us=round((read.ended_s - read.asked_s) * 1e6),
            )
            for read in [read for read in self.spans if read.nbytes][-MEASURED_SPANS_MAX:]
        ]

    @property
    def blocks(self) -> int:
        return self.peer_blocks + self.store_blocks

    def count(self, source: KvSource, blocks: int) -> None:
        if source == KvSource.STORE:
            self.store_blocks += blocks
        else:
            self.peer_blocks += blocks


class WantedBlocks(NamedTuple):
    """A prompt's blocks: ``keys`` into the blocks of ``table``."""

    order: PrefillOrder
    keys: Sequence[BlockKey]
    table: Sequence[int]
    abort: Abort
    traceparent: str


class Fetcher:
    """The reader into this worker's pool.

    If given, ``layers`` moves a prompt's last span layer by layer, and ``store`` is asked for KV that nobody has
    planned."""

    def __init__(
        self,
        source: BlockReader,
        memory: KvMemory,
        layout: KvLayout,
        clock: Clock,
        limits: WorkerLimits,
        layers: TransferEngine | None = None,
        store: StoreClient | None = None,
    ) -> None:
        self._source = source
        self._memory = memory
        self._layout = layout
        self._clock = clock
        self._timeout_s = limits.fetch_timeout_s
        self._layers = layers
        self._store = store
        self._avoidance = Avoidance(max_s=MAX_PAUSE_S)
        self._tried: set[str] = set()
        """The addresses of sources that a trial is under way to."""
        self.failures = 0
        """Spans of which not everything arrived."""

    @property
    def corrupt(self) -> int:
        """The number of blocks that arrived with other bytes than were put."""
        return self._source.corrupt

    def failed_sources(self) -> list[str]:
        """Returns the addresses of sources that are avoided now: those that failed last, if they are many."""
        return self._avoidance.avoided(self._clock())[-REPORTED_SOURCES_MAX:]

    async def fetch(self, wanted: WantedBlocks, first: int) -> Fetched:
        """Fetches blocks from ``first`` on without a gap.

        The order's spans name the sources; if none are planned, the store is asked. The conductor knows only a sample
        of the blocks (:mod:`pinyon.core.key_sample`), so it is not sure where the source of the next span takes over.
        So the source of a span is asked for the first blocks of the next one, too. What did not come is asked for once
        more, from other copies in the store. Raises only the error of ``wanted.abort``; nothing is under way then."""
        order, keys = wanted.order, wanted.keys
        failures, fetched = self.failures, Fetched(self._clock())
        spans: Sequence[FetchSpan] = order.fetches
        if order.ask_store:
            spans = await self._look(wanted, first, len(keys), ())
        whole_s = self._whole_s(spans, first, len(keys))
        end = min(len(keys), max((span.end for span in spans), default=0))
        await self._fetch(wanted, spans, first, fetched, whole_s)
        at = first + fetched.blocks
        if at < end and fetched.layered is None and self._clock() - fetched.start_s < whole_s:
            others = await self._look(wanted, at, end, {span.address for span in spans})
            await self._fetch(wanted, others, first, fetched, whole_s)
        if failures == self.failures:  # after a failure, the time says nothing about the bytes
            fetched.bytes = fetched.blocks * self._layout.block_bytes
        fetched.begun_s = self._clock()
        return fetched

    async def _look(self, wanted: WantedBlocks, at: int, end: int, without: Collection[str]) -> Sequence[FetchSpan]:
        """Asks the store for copies of blocks ``[at, end)``, none of them at the addresses ``without``."""
        if self._store is None:
            return ()
        # It has the time of a fetch; Redis is given up sooner.
        size, timeout_s = self._layout.block_bytes, self._timeout_s
        looking = asyncio.ensure_future(find_spans(self._store, wanted.keys[at:end], size, timeout_s, at, without))
        try:
            return await wanted.abort.wait(looking)
        finally:
            looking.cancel()

    async def _fetch(
        self, wanted: WantedBlocks, spans: Sequence[FetchSpan], first: int, fetched: Fetched, whole_s: float
    ) -> None:
        """Reads the spans in turn, up to the first one of which something is missing."""
        keys = wanted.keys
        for span, after in zip_longest(spans, spans[1:]):
            at, end = first + fetched.blocks, min(span.end, len(keys))
            if at >= end or self._avoidance.avoids(span.address, self._clock()) or span.address in self._tried:
                continue
            left_s = whole_s - (self._clock() - fetched.start_s)
            if span.first > at or left_s <= 0:
                break
            if span.address in self._avoidance:
                tried = await self._try(wanted, span, at, min(left_s, TRIAL_S))
                fetched.count(span.source, tried)
                at += tried
                left_s = whole_s - (self._clock() - fetched.start_s)
                if not tried:
                    self.failures += 1
                if not tried or at == end or left_s <= 0:
                    continue
            asked = end if after is None else min(after.end, end + EVERY_MAX - 1, len(keys))
            read = SpanRead(span, left_s, whole_s, self._clock())
            if self._layers is not None and after is None:
                read.arrivals = LayerArrivals(self._layers, self._layout)
            read.blocks = await self._arrive(wanted, read, at, asked)
            if not read.reading.done():
                fetched.layered = read
            fetched.count(span.source, read.blocks)
            fetched.spans.append(read)
            if read.blocks < end - at:
                self.failures += 1
                break
            read.nbytes = read.blocks * self._layout.block_bytes

    def _whole_s(self, spans: Sequence[FetchSpan], first: int, end: int) -> float:
        """Returns the time for all spans: a failing source is found out soon, and a long prefix has time enough."""
        blocks = max((min(span.end, end) - first for span in spans), default=0)
        return self._timeout_s + max(0, blocks) * self._layout.block_bytes / RATE_MIN_BYTES_S

    async def _try(self, wanted: WantedBlocks, span: FetchSpan, at: int, timeout_s: float) -> int:
        """Tries a source that failed last time with one block, while others avoid it; returns how many arrived."""
        self._tried.add(span.address)
        try:
            return await self._arrive(wanted, SpanRead(span, timeout_s, TRIAL_S, self._clock()), at, at + 1)
        finally:
            self._tried.discard(span.address)

    def lost(self, layered: SpanRead) -> None:
        """Records that its layers did not all come in time; :meth:`SpanRead.stop` follows."""
        self.failures += 1
        late = DeadlineExceeded("a layer did not come")
        # A reading that is done was judged when it ended.
        if not layered.reading.done() and blames_peer(late, layered.offered_s, layered.whole_s):
            self._avoidance.failed(layered.span.address, self._clock())

    async def _arrive(self, wanted: WantedBlocks, read: SpanRead, at: int, end: int) -> int:
        """Asks for blocks ``[at, end)``; returns how many arrived or, while the read goes on, have a first layer."""
        reading = read.reading = asyncio.ensure_future(self._read(wanted, read, at, end))
        first: set[asyncio.Future[int]] = {reading}
        if read.arrivals is not None:
            first.add(read.arrivals.first_layer)
        waited = asyncio.ensure_future(
            asyncio.wait(first, timeout=read.offered_s + OVERRUN_S, return_when=asyncio.FIRST_COMPLETED)
        )
        under_way = False
        try:
            await wanted.abort.wait(waited)
            if reading.done():
                return reading.result()
            if read.arrivals is not None and read.arrivals.first_layer.done():
                under_way = True
                return read.arrivals.first_layer.result()
            # the source did not even keep to its own time limit
            self._avoidance.failed(read.span.address, self._clock())
            return 0
        finally:
            waited.cancel()
            if not under_way:
                reading.cancel()
                await asyncio.wait((reading,))

    async def _read(self, wanted: WantedBlocks, read: SpanRead, at: int, end: int) -> int:
        """Returns how many leading blocks arrived, whatever goes wrong."""
        order, places = wanted.order, [self._memory.pieces(block) for block in wanted.table[at:end]]
        terms = ReadTerms(order.request_id, wanted.traceparent, order.request_class, at)
        try:
            return await read_span(
                *(self._source, self._avoidance, self._clock, read.span, wanted.keys[at:end], places),
                *(self._layout.block_bytes, read.offered_s, read.whole_s, terms, read.arrivals),
            )
        finally:
            read.ended_s = self._clock()
