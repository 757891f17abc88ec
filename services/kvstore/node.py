"""A store node: the object table with real memory, real time, and writers that must be shut out in time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, NotFound, PinyonError, Unavailable
from pinyon.core.request import UNKNOWN_CLASS, RequestClass, Role
from pinyon.eviction import EVICTION_POLICIES, EvictionPolicy, Traits, Use
from pinyon.paging import LeaseTable
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from pinyon.runtime.big_memory import BigMemory
from pinyon.runtime.deadlines import Deadline
from pinyon.runtime.eviction import RefitThread
from pinyon.runtime.eviction_choice import whole_choice
from pinyon.runtime.logging import get_logger
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.background import Background
from pinyon.store.kv_object import Lease, PutSlot, SlotState
from pinyon.store.lease_keys import LeaseKeys
from pinyon.store.objects import ObjectTable
from pinyon.transfer import Access, Grant, RegionDescriptor, SegmentDescriptor, TransferEngine
from services.kvstore.settings import KvStoreSettings

END_S = 30.0
"""The seconds that ending all puts may take when the node stops."""
SWEEP_PAUSE_S = 1.0
"""The pause, in seconds, after a sweep that failed: what was overdue is still overdue."""

_log = get_logger("node")


class StoreNode:
    """A store node on one event loop, where it is made and closed. The caller owns the running engine."""

    def __init__(
        self, node_id: str, settings: KvStoreSettings, engine: TransferEngine, *, clock: Clock = time.monotonic
    ) -> None:
        self.node_id = node_id
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._memory = BigMemory(settings.pool_mib << 20)
        self._refits = RefitThread()
        # Ids start at random: calls meant for the process before a restart must not hit a lease or put of this one.
        self.table = ObjectTable(
            OffsetAllocator(self._memory.view.nbytes),
            self.policy(settings.eviction),
            LeaseTable(first_id=1 + secrets.randbits(62), max_leases=settings.leases_max),
            first_put_id=1 + secrets.randbits(62),
            max_open_puts=settings.open_puts_max,
            refit=self._refits,
        )
        # Peers reach the memory that a lease or a put opens, and nothing else.
        self._region = engine.register_local_memory(self._memory.view, access=Access.NONE)
        self.readers = LeaseKeys(engine, self._region)
        """The keys that open memory to readers: one per lease."""
        self.writers: dict[int, Grant] = {}
        """The keys that open memory to writers: one per put."""
        self._duties = Background()
        self._next_end = Deadline(asyncio.get_running_loop(), self._sweep)
        """The time at which a lease or a put may be overdue."""
        self._on_change: list[Callable[[], None]] = []
        self.draining = False

    @property
    def boot_id(self) -> str:
        """The id of this process life, 32 hex digits."""
        return self._engine.boot_id.hex()

    @property
    def segment(self) -> SegmentDescriptor:
        """The addresses of this process for peers, without its memory, which comes with each lease and each put."""
        return self._engine.descriptor([])

    def on_change(self, callback: Callable[[], None]) -> None:
        """Registers a callback that is called when readable keys came or went."""
        self._on_change.append(callback)

    async def close(self) -> None:
        """Shuts all writers out. The memory is freed when the engine is closed."""
        self.draining = True
        self._next_end.close()
        for put_id in list(self.writers):
            if self.table.close_put(put_id):
                self._duties.run(self._end(put_id, commit=False), "put end")
        await self._duties.close(END_S)
        await self.readers.close()
        await self._refits.close()
        self._memory.close()

    # -- puts

    def put_start(
        self,
        keys: Sequence[bytes],
        object_bytes: int,
        timeout_s: float,
        request_class: RequestClass = UNKNOWN_CLASS,
        places: Sequence[int] = (),
    ) -> tuple[int, list[PutSlot], RegionDescriptor | None]:
        """Begins a put. Returns its id, one slot per key and the place to write to. ``timeout_s`` 0 means the default.

        The put gets a key of its own, which opens only its slots, for writing, until the put ends."""
        if self.draining:
            raise Unavailable("the store node is stopping")
        timeout_s = min(timeout_s or self._settings.put_timeout_s, self._settings.put_timeout_max_s)
        put_id, slots = self.table.put_start(
            keys, object_bytes, self._clock(), timeout_s, Traits.of(request_class), places
        )
        self._changed()  # an object may have been evicted
        if not put_id:
            return 0, slots, None
        try:
            ranges = [(slot.offset, object_bytes) for slot in slots if slot.state is SlotState.RESERVED]
            grant = self._engine.grant(self._region, ranges, Access.WRITE, lifetime_s=timeout_s)
        except PinyonError:
            self.table.close_put(put_id)
            self.table.end_put(put_id, commit=False, now_s=self._clock())
            raise
        self.writers[put_id] = grant
        self._sweep_in(timeout_s)
        return put_id, slots, grant.descriptor()

    async def put_end(self, put_id: int, *, commit: bool) -> int:
        """Ends a put and returns how many objects became readable.

        Raises :class:`NotFound` for a put that ended before, perhaps by its timeout."""
        if not self.table.close_put(put_id):
            raise NotFound("no such put; it may have timed out", field="put_id")
        # Shielded, so that a caller which goes away now does not leave the put half ended.
        return await asyncio.shield(self._duties.run(self._end(put_id, commit=commit), "put end"))

    async def _end(self, put_id: int, *, commit: bool) -> int:
        try:
            await self._engine.revoke_async(self.writers[put_id])
        except PinyonError:
            _log.exception("a writer cannot be shut out; its room is lost")
            self.table.end_put(put_id, commit=False, now_s=self._clock(), lost=True)
            raise FailedPrecondition("the put's memory cannot be used") from None
        finally:
            del self.writers[put_id]
        committed = self.table.end_put(put_id, commit=commit, now_s=self._clock())
        if committed:
            self._changed()
        return committed

    # -- reading

    def acquire(
        self,
        keys: Sequence[bytes],
        lease_s: float,
        *,
        allow_gaps: bool,
        use: Use = Use(),  # noqa: B008  # a value
    ) -> tuple[Lease, float, RegionDescriptor | None]:
        """Grants a lease. Returns it, its length in seconds and where to read. ``lease_s`` 0 means the default.

        The lease gets a key of its own, which opens the leased objects for reading until the lease ends."""
        lease_s = min(lease_s or self._settings.lease_s, self._settings.lease_max_s)
        lease = self.table.acquire(keys, self._clock(), lease_s, allow_gaps=allow_gaps, use=use)
        if not lease.lease_id:
            return lease, 0.0, None
        try:
            ranges = [(held.offset, held.size) for _, held in lease.blocks]
            opened = self.readers.give(lease.lease_id, ranges, lease_s)
        except PinyonError:
            self.table.release(lease.lease_id, self._clock())
            raise
        self._sweep_in(lease_s)
        return lease, lease_s, opened

    def release(self, lease_id: int) -> bool:
        """Ends a lease. Returns False if it ended before. Its objects may be evicted once nobody reads them."""
        return self.readers.end(lease_id, lambda: self._over(lease_id))

    def _over(self, lease_id: int) -> None:
        self.table.release(lease_id, self._clock())

    def remove(self, keys: Sequence[bytes]) -> int:
        removed = self.table.remove(keys, self._clock())
        if removed:
            self._changed()
        return removed

    def policy(self, choice: str) -> EvictionPolicy[bytes]:
        """Makes the chosen eviction policy. Raises ``ValueError``."""
        return EVICTION_POLICIES.make(whole_choice(choice, self._clock))

    def switch(self, eviction: EvictionPolicy[bytes]) -> None:
        """Switches the eviction policy: see :meth:`ObjectTable.switch`."""
        self.table.switch(eviction, self._clock())

    # -- time

    def _sweep(self) -> None:
        """Ends the leases and puts that are overdue, and sets the timer for the next ones."""
        now, pause_s = self._clock(), SWEEP_PAUSE_S
        try:
            for lease_id in self.table.overdue_leases(now):
                self.release(lease_id)
            for put_id in self.table.close_overdue(now):
                _log.warning("a put timed out; its room is given back")
                self._duties.run(self._end(put_id, commit=False), "put end")
            pause_s = 0.0
        finally:  # also after a defect: without sweeping, overdue leases and puts would fill the pool
            next_s = self.table.next_deadline_s()
            if next_s is not None:
                self._sweep_in(max(pause_s, next_s - now))

    def _sweep_in(self, seconds: float) -> None:
        """Sets the timer for a lease or put that ends in so many seconds, unless another one ends sooner."""
        due = asyncio.get_running_loop().time() + seconds
        if due < self._next_end.due:
            self._next_end.set(due)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nobody reads or writes here; returns whether that happened in time. Nothing new may begin."""
        deadline = self._clock() + timeout_s
        while self.table.leases or self.table.open_puts:
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(0.02)  # only while stopping
        return True

    def _changed(self) -> None:
        for callback in self._on_change:
            callback()


class StoreReport:
    """The reports of a store node to the conductor: a :class:`pinyon.runtime.report_session.ReportSource`."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._changes = node.table.listen()

    def info(self, address: str) -> InstanceInfo:
        """Returns the node's registration. Its capacity in blocks depends on their size, so it is left open."""
        return InstanceInfo(self._node.node_id, self._node.boot_id, Role.STORE, address)

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._node.table.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._changes.drain()

    def load(self) -> InstanceLoad:
        table = self._node.table
        return InstanceLoad(
            used_blocks=table.leased_objects + table.reserved_objects,
            cached_blocks=table.idle_objects,
            draining=self._node.draining,
        )

    def news(self) -> None:
        """Reports nothing, because a store node computes nothing."""

    def decoding(self) -> Sequence[str]:
        return ()
