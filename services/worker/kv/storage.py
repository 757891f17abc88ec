"""New blocks go to the KV store in the background, never in a request's way.

Each waiting block is referenced, so its content stays until it is written. When more blocks wait than the queue holds,
the newest are dropped and counted: the store is a cache.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.store.client import PutOutcome, PutResult
from pinyon.transfer import Region
from services.worker.kv.cache import KvCache

__all__ = ["ObjectStore", "Storage"]

BATCH_BLOCKS = 64
KNOWN_KEYS = 65536
FIRST_PAUSE_S = 1.0
"""After a failure: a store that is down must not be asked for every block."""
MAX_PAUSE_S = 8.0

_log = get_logger("storage")


class ObjectStore(Protocol):
    """What puts objects: :class:`pinyon.store.client.StoreClient`."""

    async def put(
        self,
        objects: Sequence[tuple[BlockKey, Region, int]],
        object_bytes: int,
        timeout_s: float,
        *,
        affinity: bytes | None = None,
        request_class: RequestClass = UNKNOWN_CLASS,
    ) -> PutResult: ...


class _Waiting(NamedTuple):
    """``block`` waits to be put with others of the same affinity, for a request of this class."""

    block: int
    affinity: BlockKey
    request_class: RequestClass

    def goes_with(self, first: _Waiting) -> bool:
        """Whether one put takes both: equal affinity implies the tenant, and a put names one type and turn."""
        return self.affinity == first.affinity and self.request_class.category == first.request_class.category


class Storage:
    """``offer`` blocks; ``start`` and ``close`` on the event loop. Without a store everything is a no-op."""

    def __init__(
        self,
        cache: KvCache,
        region: Region,
        store: ObjectStore | None,
        queue_blocks: int,
        timeout_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._cache = cache
        self._region = region
        self._store = store if queue_blocks else None
        self._limit = queue_blocks
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: dict[BlockKey, _Waiting] = {}
        self._writing = 0
        self._known: OrderedDict[BlockKey, None] = OrderedDict()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stored = 0
        """Blocks put so far."""
        self.dropped = 0
        """Blocks not put because too many waited or the store failed."""

    @property
    def pending(self) -> int:
        """Blocks that wait or are being written; each holds a reference."""
        return len(self._queue) + self._writing

    def start(self) -> None:
        if self._store is not None:
            self._task = asyncio.create_task(self._run(self._store), name="storage")

    def offer(self, keys: Sequence[BlockKey], affinity: BlockKey, request_class: RequestClass = UNKNOWN_CLASS) -> None:
        """These blocks of the pool are new and complete. Blocks of equal ``affinity`` (their prompt's first key) go to
        one node, because they will be read together."""
        if self._task is None:
            return
        wanted = [key for key in keys if key not in self._known and key not in self._queue]
        room = max(0, self._limit - self.pending)
        self.dropped += max(0, len(wanted) - room)
        del wanted[room:]
        for index, block in self._cache.hold(wanted):
            self._queue[wanted[index]] = _Waiting(block, affinity, request_class)
        if self._queue:
            self._wake.set()

    def _remember(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Drop what waits. Bounded by one put's timeout."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None
        self._cache.release(each.block for each in self._queue.values())
        self._queue.clear()

    async def _run(self, store: ObjectStore) -> None:
        pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=1)
        while True:
            self._wake.clear()
            if not self._queue:
                await self._wake.wait()
            affinity, shared, batch = self._next_batch()
            self._writing = len(batch)
            try:
                ok = await self._put(store, affinity, shared, batch)
            finally:
                self._writing = 0
                self._cache.release(batch.values())
            if ok:
                pauses.succeeded("store")
            else:
                pauses.failed("store", self._clock())
                await asyncio.sleep(pauses.left_s("store", self._clock()))

    def _next_batch(self) -> tuple[BlockKey, RequestClass, dict[BlockKey, int]]:
        """The longest waiting block with those that go with it, their affinity, and what their classes share."""
        first = next(iter(self._queue.values()))
        together = ((key, each) for key, each in self._queue.items() if each.goes_with(first))
        batch = dict(islice(together, BATCH_BLOCKS))
        for key in batch:
            del self._queue[key]
        shared = first.request_class
        if any(each.request_class != shared for each in batch.values()):  # of several requests
            shared = RequestClass(shared.kind, shared.turn, tenant=shared.tenant)
        return first.affinity, shared, {key: each.block for key, each in batch.items()}

    async def _put(
        self, store: ObjectStore, affinity: BlockKey, request_class: RequestClass, batch: dict[BlockKey, int]
    ) -> bool:
        """False: the store is to be left alone for a while."""
        size = self._cache.layout.block_bytes
        objects = [(key, self._region, block * size) for key, block in batch.items()]
        try:
            result = await store.put(objects, size, self._timeout_s, affinity=affinity, request_class=request_class)
        except PinyonError as error:
            _log.info("the KV store took nothing: %s", error.message)
        except Exception:
            _log.exception("putting blocks into the KV store failed")
        else:
            present = [key for key, there in zip(batch, result.present, strict=True) if there]
            self.stored += result.count(PutOutcome.STORED)
            self.dropped += len(batch) - len(present)
            self._remember(present)
            return bool(present)
        self.dropped += len(batch)
        return False
