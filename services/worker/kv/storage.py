"""The writer that puts new blocks into the KV store in the background, never in a request's way.

Each waiting block is referenced, so its content stays until it is written; this must cost requests nothing. So at most
a share of the pool waits, none longer than some seconds. The longest waiting blocks are dropped as soon as a request
wants their room or the store takes nothing. Dropped blocks are counted: the store is a cache.

The store is asked at every put for what it holds, and the answer is not remembered, as it forgets, too. This module
remembers which blocks of the pool were not offered since the store last lost a node, or never. When they are reused,
they are offered again, so that lost blocks come back without being recomputed."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended
from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import KvMemory
from pinyon.store.runs import Run, Runs
from pinyon.store.writer import PutOutcome
from services.worker.kv.cache import KvCache
from services.worker.orders.limits import WorkerLimits

BATCH_BLOCKS = 64
POOL_SHARE = 4
"""The divisor of the pool: at most one block in this many waits for the store."""
FIRST_PAUSE_S = 1.0
"""The first pause after a failure: a store that is down must not be asked for every block."""
MAX_PAUSE_S = 8.0
LOOK_S = 1.0
"""The interval in s at which reused prompts have the writer check whether the store has lost a node."""

_log = get_logger("storage")


class Drop(StrEnum):
    """The reason why a block was not put."""

    QUEUE = "queue"
    """The queue was full."""
    STORE = "store"
    """The store failed, or did so just before."""
    SPACE = "space"
    """The store had no room for the block."""
    LATE = "late"
    """The block waited too long."""
    ROOM = "room"
    """A request wanted the block's room."""


class _Waiting(NamedTuple):
    """A block that waits since ``since_s``, at this place of the prompt of a request of this class."""

    block: int
    place: int
    run: Run
    request_class: RequestClass
    since_s: float

    def goes_with(self, first: _Waiting) -> bool:
        """Returns whether one put takes both: it names one tenant, type and turn."""
        mine, others = self.request_class, first.request_class
        return mine.tenant == others.tenant and mine.category == others.category


class Storage:
    """The writer: ``offer`` blocks; ``start`` and ``close`` on the event loop. Without a store it does nothing."""

    def __init__(
        self, cache: KvCache, memory: KvMemory, store: StoreClient | None, limits: WorkerLimits, clock: Clock
    ) -> None:
        self._cache = cache
        self._memory = memory
        self._limit = min(limits.store_queue_blocks, cache.pool.total // POOL_SHARE)
        self._store = store if self._limit else None
        self._queue_s = limits.store_queue_s
        self._timeout_s = limits.store_timeout_s
        self._clock = clock
        self._queue: dict[BlockKey, _Waiting] = {}  # the longest waiting first
        self._writing: dict[BlockKey, _Waiting] = {}
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=1)
        self._asked_at = array("q", bytes(8 * cache.pool.total))
        """The era in which each block's content was offered to the store; 0: never."""
        self._look_at_s = float("-inf")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stored = 0
        self.drops: Counter[Drop] = Counter()
        """Blocks not put, by the reason."""

    @property
    def pending(self) -> int:
        """Blocks that wait or are being written; each holds a reference."""
        return len(self._queue) + len(self._writing)

    def start(self) -> None:
        if self._store is not None:
            self._task = asyncio.create_task(self._run(self._store), name="storage")
            self._cache.spare = self._give_back
            self._cache.on_published = self._forget

    def new_runs(self) -> Runs:
        """Returns the runs for the blocks of one prompt."""
        return Runs(self._cache.layout.block_tokens)

    def offer(
        self, keys: Sequence[BlockKey], runs: Runs, request_class: RequestClass = UNKNOWN_CLASS, first: int = 0
    ) -> None:
        """Offers new, complete blocks: the next ones of the prompt of ``runs``, from its block ``first`` on."""
        if self._task is not None:
            dropped = self._take({key: place for place, key in enumerate(keys, first)}, runs, request_class)
            self.drops[Drop.STORE if self._paused else Drop.QUEUE] += dropped

    def reused(
        self, keys: Sequence[BlockKey], table: Sequence[int], runs: Runs, request_class: RequestClass = UNKNOWN_CLASS
    ) -> None:
        """Offers blocks, the first of ``table``, that were in the pool already, as the store may lack them."""
        if self._store is None or self._task is None:
            return
        if self._clock() >= self._look_at_s:
            self._wake.set()
        era = self._era(self._store)
        asked_at = self._asked_at
        wanted = {
            key: place for place, (key, block) in enumerate(zip(keys, table, strict=False)) if asked_at[block] < era
        }
        if wanted:
            self._take(wanted, runs, request_class)

    async def close(self) -> None:
        """Drops the waiting blocks. Takes at most one put's timeout."""
        if self._task is not None:
            await ended(self._task)
            self._task = None
            self._cache.spare = None
            self._cache.on_published = None
        self._cache.release(each.block for each in self._queue.values())
        self._queue.clear()

    # -- the queue

    @staticmethod
    def _era(store: StoreClient) -> int:
        return 1 + store.losses

    @property
    def _paused(self) -> bool:
        return self._pauses.avoids("store", self._clock())

    def _take(self, wanted: Mapping[BlockKey, int], runs: Runs, request_class: RequestClass) -> int:
        """Takes as many of the first new keys, with their places, as there is room for; returns how many it drops."""
        self._drop_late()
        fresh = [key for key in wanted if key not in self._queue and key not in self._writing]
        room = 0 if self._paused else max(0, self._limit - self.pending)
        keys = fresh[:room]
        now_s = self._clock()
        for index, block in self._cache.hold(keys):
            key = keys[index]
            self._queue[key] = _Waiting(block, wanted[key], runs.next(), request_class, now_s)
        if self._queue:
            self._wake.set()
        return len(fresh) - len(keys)

    def _drop(self, keys: Sequence[BlockKey], reason: Drop) -> None:
        blocks = [self._queue.pop(key).block for key in keys]
        self.drops[reason] += len(blocks)
        self._forget(blocks)
        self._cache.release(blocks)

    def _forget(self, blocks: Iterable[int]) -> None:
        """Records that the store does not have these blocks, as far as is known here."""
        for block in blocks:
            self._asked_at[block] = 0

    def _drop_late(self) -> None:
        before_s = self._clock() - self._queue_s
        late = []
        for key, each in self._queue.items():
            if each.since_s > before_s:
                break
            late.append(key)
        self._drop(late, Drop.LATE)

    def _give_back(self) -> Iterator[None]:
        """Drops the longest waiting blocks with no other user, one per iteration, for requests that want room."""
        for key, each in list(self._queue.items()):
            if self._cache.pool.references(each.block) == 1:
                self._drop([key], Drop.ROOM)
                yield

    def _next_batch(self) -> tuple[RequestClass, dict[BlockKey, _Waiting]]:
        """Takes the longest waiting block and those that go with it; returns them and what their classes share."""
        first = next(iter(self._queue.values()))
        together = ((key, each) for key, each in self._queue.items() if each.goes_with(first))
        batch = dict(islice(together, BATCH_BLOCKS))
        for key in batch:
            del self._queue[key]
        shared = first.request_class
        if any(each.request_class != shared for each in batch.values()):  # blocks of several requests
            shared = RequestClass(shared.kind, shared.turn, tenant=shared.tenant)
        return shared, batch

    # -- writing

    async def _run(self, store: StoreClient) -> None:
        while True:
            self._drop_late()
            self._wake.clear()
            if not self._queue:
                await self._wake.wait()
                await self._look(store)
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

    async def _look(self, store: StoreClient) -> None:
        """Checks now and then whether a node was lost."""
        now_s = self._clock()
        if now_s < self._look_at_s or self._queue:  # waiting blocks find out as they are put
            return
        self._look_at_s = now_s + LOOK_S
        try:
            await store.nodes()
        except PinyonError:
            pass  # nothing is known, so nothing counts as lost
        except Exception:
            _log.exception("looking at the store's nodes failed")

    async def _put(self, store: StoreClient, request_class: RequestClass, batch: dict[BlockKey, _Waiting]) -> bool:
        """Puts a batch. Returns False if the store is to be left alone for a while."""
        size = self._memory.object_bytes
        objects = [(key, self._memory.pieces(each.block)) for key, each in batch.items()]
        runs = [each.run for each in batch.values()]
        places = [each.place for each in batch.values()]
        blocks = [each.block for each in batch.values()]
        era = self._era(store)
        for block in blocks:
            self._asked_at[block] = era
        try:
            await self._cache.settled(blocks)
            result = await store.put(
                objects, size, self._timeout_s, runs=runs, request_class=request_class, places=places
            )
        except PinyonError as error:
            _log.info("the KV store took nothing: %s", error.message)
        except Exception:
            _log.exception("putting blocks into the KV store failed")
        else:
            refused, failed = result.count(PutOutcome.NO_SPACE), result.count(PutOutcome.FAILED)
            self.stored += result.count(PutOutcome.STORED)
            self.drops[Drop.SPACE] += refused
            self.drops[Drop.STORE] += failed
            outcomes = zip(blocks, result, strict=True)
            self._forget(block for block, outcome in outcomes if outcome is PutOutcome.FAILED)
            return refused + failed < len(batch)
        self.drops[Drop.STORE] += len(batch)
        self._forget(blocks)
        return False
