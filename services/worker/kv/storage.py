"""New blocks go to the KV store in the background, never in a request's way.

Each waiting block is referenced, so its content stays until it is written; that may cost requests nothing. So at most a
share of the pool waits, none longer than some seconds, and the longest waiting go as soon as somebody wants their room
or the store takes nothing. What is dropped is counted: the store is a cache.

What the store holds is asked of it at every put and never remembered here: it forgets, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, Protocol

from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.store.client import PutOutcome, PutResult
from pinyon.store.runs import Run, Runs
from pinyon.transfer import Region
from services.worker.kv.cache import KvCache

__all__ = ["Drop", "ObjectStore", "Storage"]

BATCH_BLOCKS = 64
POOL_SHARE = 4
"""At most one block of the pool in this many waits for the store."""
FIRST_PAUSE_S = 1.0
"""After a failure: a store that is down must not be asked for every block."""
MAX_PAUSE_S = 8.0

_log = get_logger("storage")


class Drop(StrEnum):
    """Why a block was not put."""

    QUEUE = "queue"
    """Too many waited."""
    STORE = "store"
    """The store failed, or did so just before."""
    SPACE = "space"
    """The store had no room for it."""
    LATE = "late"
    """It waited too long."""
    ROOM = "room"
    """A request wanted its room."""


class ObjectStore(Protocol):
    """What puts objects: :class:`pinyon.store.client.StoreClient`."""

    async def put(
        self,
        objects: Sequence[tuple[BlockKey, Region, int]],
        object_bytes: int,
        timeout_s: float,
        *,
        runs: Sequence[Run] | None = None,
        request_class: RequestClass = UNKNOWN_CLASS,
    ) -> PutResult: ...


class _Waiting(NamedTuple):
    """``block`` waits since ``since_s`` to be put, for a request of this class."""

    block: int
    run: Run
    request_class: RequestClass
    since_s: float

    def goes_with(self, first: _Waiting) -> bool:
        """Whether one put takes both: it names one tenant, type and turn."""
        mine, others = self.request_class, first.request_class
        return mine.tenant == others.tenant and mine.category == others.category


class Storage:
    """``offer`` blocks; ``start`` and ``close`` on the event loop. Without a store everything is a no-op."""

    def __init__(
        self,
        cache: KvCache,
        region: Region,
        store: ObjectStore | None,
        queue_blocks: int,
        queue_s: float,
        timeout_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        """``queue_s``: how long a block may wait until its put begins; ``timeout_s``: how long that may take."""
        self._cache = cache
        self._region = region
        self._limit = min(queue_blocks, cache.pool.total // POOL_SHARE)
        self._store = store if self._limit else None
        self._queue_s = queue_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: dict[BlockKey, _Waiting] = {}  # the longest waiting first
        self._writing: dict[BlockKey, _Waiting] = {}
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=1)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stored = 0
        """Blocks put so far."""
        self.drops: Counter[Drop] = Counter()
        """Blocks not put, by the reason."""

    @property
    def pending(self) -> int:
        """Blocks that wait or are being written; each holds a reference."""
        return len(self._queue) + len(self._writing)

    @property
    def dropped(self) -> int:
        """Blocks not put."""
        return self.drops.total()

    def start(self) -> None:
        if self._store is not None:
            self._task = asyncio.create_task(self._run(self._store), name="storage")
            self._cache.on_shortage = self._give_back

    def new_runs(self) -> Runs:
        """For the blocks of one prompt."""
        return Runs(self._cache.layout.block_tokens)

    def offer(self, keys: Sequence[BlockKey], runs: Runs, request_class: RequestClass = UNKNOWN_CLASS) -> None:
        """These blocks of the pool are new and complete, and the next ones of the prompt that ``runs`` is for."""
        if self._task is None:
            return
        self._drop_late()
        wanted = [key for key in keys if key not in self._queue and key not in self._writing]
        now_s = self._clock()
        paused = self._pauses.avoids("store", now_s)
        room = 0 if paused else max(0, self._limit - self.pending)
        self.drops[Drop.STORE if paused else Drop.QUEUE] += max(0, len(wanted) - room)
        del wanted[room:]
        for index, block in self._cache.hold(wanted):
            self._queue[wanted[index]] = _Waiting(block, runs.next(), request_class, now_s)
        if self._queue:
            self._wake.set()

    async def close(self) -> None:
        """Drop what waits. Bounded by one put's timeout."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None
            self._cache.on_shortage = None
        self._cache.release(each.block for each in self._queue.values())
        self._queue.clear()

    # -- the queue

    def _drop(self, keys: Sequence[BlockKey], reason: Drop) -> None:
        blocks = [self._queue.pop(key).block for key in keys]
        self.drops[reason] += len(blocks)
        self._cache.release(blocks)

    def _drop_late(self) -> None:
        before_s = self._clock() - self._queue_s
        late = []
        for key, each in self._queue.items():
            if each.since_s > before_s:
                break
            late.append(key)
        self._drop(late, Drop.LATE)

    def _give_back(self) -> None:
        """Somebody waits for room: the longest waiting blocks that nobody else uses go, until there is enough."""
        for key, each in list(self._queue.items()):
            if not self._cache.waiting:
                return
            if self._cache.pool.references(each.block) == 1:
                self._drop([key], Drop.ROOM)

    def _next_batch(self) -> tuple[RequestClass, dict[BlockKey, _Waiting]]:
        """The longest waiting block with those that go with it, and what their classes share."""
        first = next(iter(self._queue.values()))
        together = ((key, each) for key, each in self._queue.items() if each.goes_with(first))
        batch = dict(islice(together, BATCH_BLOCKS))
        for key in batch:
            del self._queue[key]
        shared = first.request_class
        if any(each.request_class != shared for each in batch.values()):  # of several requests
            shared = RequestClass(shared.kind, shared.turn, tenant=shared.tenant)
        return shared, batch

    # -- writing

    async def _run(self, store: ObjectStore) -> None:
        while True:
            self._drop_late()
            self._wake.clear()
            if not self._queue:
                await self._wake.wait()
                continue
            request_class, self._writing = self._next_batch()
            ok = False
            try:
                ok = await self._put(store, request_class, self._writing)
            finally:
                blocks = [each.block for each in self._writing.values()]
                self._writing = {}
                self._cache.release(blocks)
            if ok:
                self._pauses.succeeded("store")
            else:
                self._pauses.failed("store", self._clock())
                self._drop(list(self._queue), Drop.STORE)

    async def _put(self, store: ObjectStore, request_class: RequestClass, batch: dict[BlockKey, _Waiting]) -> bool:
        """False: the store is to be left alone for a while."""
        size = self._cache.layout.block_bytes
        objects = [(key, self._region, each.block * size) for key, each in batch.items()]
        runs = [each.run for each in batch.values()]
        try:
            result = await store.put(objects, size, self._timeout_s, runs=runs, request_class=request_class)
        except PinyonError as error:
            _log.info("the KV store took nothing: %s", error.message)
        except Exception:
            _log.exception("putting blocks into the KV store failed")
        else:
            refused, failed = result.count(PutOutcome.NO_SPACE), result.count(PutOutcome.FAILED)
            self.stored += result.count(PutOutcome.STORED)
            self.drops[Drop.SPACE] += refused
            self.drops[Drop.STORE] += failed
            return refused + failed < len(batch)
        self.drops[Drop.STORE] += len(batch)
        return False
