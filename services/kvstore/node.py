"""A store node: the object table with real memory behind it, real time, and writers that must be kept out."""

from __future__ import annotations

import asyncio
import mmap
import secrets
import time
from collections.abc import Callable, Sequence

from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, NotFound, PinyonError, Unavailable
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.paging import LeaseTable
from pinyon.runtime.logging import get_logger
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.background import Background
from pinyon.store.kv_object import Lease, PutSlot
from pinyon.store.objects import ObjectTable
from pinyon.transfer import Access, Region, SegmentDescriptor, TransferEngine
from services.kvstore.settings import KvStoreSettings

__all__ = ["StoreNode"]

ALIGNMENT_BYTES = 64
END_S = 30.0
"""Bound on ending all puts when the node stops."""

_log = get_logger("node")


class StoreNode:
    """Lives on one event loop; ``start`` and ``close`` on it. The engine is the caller's and is running."""

    def __init__(
        self, node_id: str, settings: KvStoreSettings, engine: TransferEngine, *, clock: Clock = time.monotonic
    ) -> None:
        self.node_id = node_id
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._pool = memoryview(mmap.mmap(-1, settings.pool_mib << 20))  # page-aligned, taken from the system on use
        # Ids start anywhere: what was meant for the process before a restart must not hit something of this one.
        self.table = ObjectTable(
            OffsetAllocator(self._pool.nbytes, ALIGNMENT_BYTES),
            EVICTION_POLICIES.make(settings.eviction),
            LeaseTable(first_id=1 + secrets.randbits(62), max_leases=settings.leases_max),
            first_put_id=1 + secrets.randbits(62),
            max_open_puts=settings.open_puts_max,
        )
        self._readers = engine.register_local_memory(self._pool, access=Access.READ)
        self._writers: dict[int, Region] = {}
        self._duties = Background()
        self._sooner = asyncio.Event()
        self._sweep_at_s = float("inf")
        self._sweeper: asyncio.Task[None] | None = None
        self._on_change: list[Callable[[], None]] = []
        self.draining = False

    @property
    def boot_id(self) -> str:
        """32 hex digits."""
        return self._engine.boot_id.hex()

    @property
    def segment(self) -> SegmentDescriptor:
        """Where peers reach this process, and the one region that is open to readers."""
        return self._engine.descriptor([self._readers])

    @property
    def writer_regions(self) -> int:
        """Regions open to writers: one per put."""
        return len(self._writers)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this after readable keys came or went."""
        self._on_change.append(callback)

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep(), name="store-sweeper")

    async def close(self) -> None:
        """Shut all writers out. The memory goes when the engine is closed."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        for put_id in list(self._writers):
            if self.table.close_put(put_id):
                self._duties.run(self._end(put_id, commit=False), "put end")
        await self._duties.close(END_S)

    # -- puts

    def put_start(
        self, keys: Sequence[bytes], object_bytes: int, timeout_s: float, request_class: RequestClass = UNKNOWN_CLASS
    ) -> tuple[int, list[PutSlot], Region | None]:
        """``(put id, one slot per key, where to write)``. ``timeout_s`` 0 is the default.

        The put gets a region of its own over the pool, whose key nobody else knows, and that is gone when it ends.
        """
        if self.draining:
            raise Unavailable("the store node is stopping")
        timeout_s = min(timeout_s or self._settings.put_timeout_s, self._settings.put_timeout_max_s)
        put_id, slots = self.table.put_start(keys, object_bytes, self._clock(), timeout_s, Traits.of(request_class))
        self._changed()  # something may have been evicted
        if not put_id:
            return 0, slots, None
        try:
            region = self._engine.register_local_memory(self._pool, access=Access.READ_WRITE)
        except PinyonError:
            self.table.close_put(put_id)
            self.table.end_put(put_id, commit=False, now_s=self._clock())
            raise
        self._writers[put_id] = region
        self._sweep_by(timeout_s)
        return put_id, slots, region

    async def put_end(self, put_id: int, *, commit: bool) -> int:
        """How many objects became readable. Raises :class:`NotFound` for a put that ended, by its timeout perhaps."""
        if not self.table.close_put(put_id):
            raise NotFound("no such put; it may have timed out", field="put_id")
        # Shielded: a caller that goes away now must not leave the put half ended.
        return await asyncio.shield(self._duties.run(self._end(put_id, commit=commit), "put end"))

    async def _end(self, put_id: int, *, commit: bool) -> int:
        region = self._writers[put_id]
        try:
            # In a thread: it waits for operations in flight, and aborts them if they do not end.
            await asyncio.to_thread(self._engine.unregister, region)
        except PinyonError:
            _log.exception("a writer cannot be shut out; its room is lost")
            self.table.end_put(put_id, commit=False, now_s=self._clock(), lost=True)
            raise FailedPrecondition("the put's memory cannot be used") from None
        finally:
            del self._writers[put_id]
        committed = self.table.end_put(put_id, commit=commit, now_s=self._clock())
        if committed:
            self._changed()
        return committed

    # -- reading

    def acquire(self, keys: Sequence[bytes], lease_s: float, *, allow_gaps: bool) -> tuple[Lease, float]:
        """The lease and its length in seconds. ``lease_s`` 0 is the default."""
        lease_s = min(lease_s or self._settings.lease_s, self._settings.lease_max_s)
        lease = self.table.acquire(keys, self._clock(), lease_s, allow_gaps=allow_gaps)
        if not lease.lease_id:
            return lease, 0.0
        self._sweep_by(lease_s)
        return lease, lease_s

    def release(self, lease_id: int) -> bool:
        return self.table.release(lease_id, self._clock())

    def remove(self, keys: Sequence[bytes]) -> int:
        removed = self.table.remove(keys)
        if removed:
            self._changed()
        return removed

    # -- time

    def sweep(self) -> None:
        """End what is overdue now."""
        now = self._clock()
        self.table.expire_leases(now)
        for put_id in self.table.close_overdue(now):
            _log.warning("a put timed out; its room is given back")
            self._duties.run(self._end(put_id, commit=False), "put end")

    def _sweep_by(self, after_s: float) -> None:
        """Something will be overdue then."""
        if self._clock() + after_s < self._sweep_at_s:
            self._sooner.set()

    async def _sweep(self) -> None:
        """Sleep until the next lease or put is overdue, or a sooner one was made."""
        while True:
            self._sooner.clear()
            deadline = self.table.next_deadline_s()
            self._sweep_at_s = float("inf") if deadline is None else deadline
            wait_s = None if deadline is None else max(0.001, deadline - self._clock())
            try:
                async with asyncio.timeout(wait_s):
                    await self._sooner.wait()
            except TimeoutError:
                self.sweep()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nobody reads or writes here; whether that came in time. For a node that takes nothing new."""
        deadline = self._clock() + timeout_s
        while self.table.leases or self.table.open_puts:
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(0.02)  # only while stopping
        return True

    def _changed(self) -> None:
        for callback in self._on_change:
            callback()
