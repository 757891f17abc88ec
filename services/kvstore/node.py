"""A store node: the object table with real memory, real time, and writers that must be shut out in time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf, isfinite

from pinyon.api.conductor.v1 import conductor_pb2
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
from pinyon.store.checksums import all_checksums
from pinyon.store.disk_log import SECTOR
from pinyon.store.hot_reads import HotReads
from pinyon.store.kv_memory import Piece
from pinyon.store.kv_object import CHECKSUM_BYTES, KvObject, Lease, PutSlot, SlotState, give_checksums
from pinyon.store.lease_keys import LeaseKeys
from pinyon.store.objects import ObjectTable
from pinyon.store.quotas import parse_quotas
from pinyon.store.records import NodeRoom
from pinyon.transfer import Access, Grant, RegionDescriptor, SegmentDescriptor, TransferEngine
from services.kvstore.disk_file import DiskFile
from services.kvstore.disk_tier import FREE_SHARE, DiskTier
from services.kvstore.settings import KvStoreSettings

END_S = 30.0
"""The seconds that ending all puts may take when the node stops."""
SWEEP_PAUSE_S = 1.0
"""The pause, in seconds, after a sweep that failed: what was overdue is still overdue."""

REMOVED_AT_ONCE = 4096
SPARE_MAX = 16384
LOAD_S = 1.0
"""The longest time for which a reader waits for the disk, in seconds."""

_log = get_logger("node")


class StoreNode:
    """A store node on one event loop, where it is made and closed. The caller owns the running engine."""

    def __init__(
        self,
        node_id: str,
        settings: KvStoreSettings,
        engine: TransferEngine,
        disk: DiskFile | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Takes the file of the disk tier, if there is to be one; :meth:`start` looks for objects there."""
        self.node_id, self.zone = node_id, settings.zone
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._memory = BigMemory(settings.pool_mib << 20)
        self._refits = RefitThread()
        # Ids start at random: calls meant for the process before a restart must not hit a lease or put of this one.
        self.table = ObjectTable(
            OffsetAllocator(self._memory.view.nbytes, SECTOR if disk is not None else 64),
            self.policy(settings.eviction),
            LeaseTable(first_id=1 + secrets.randbits(62), max_leases=settings.leases_max),
            first_put_id=1 + secrets.randbits(62),
            max_open_puts=settings.open_puts_max,
            refit=self._refits,
            disk=None if disk is None else disk.log,
            quotas=parse_quotas(settings.tenant_quotas),
            pinned_share=settings.pinned_share,
        )
        self.tier = None if disk is None else DiskTier(self.table, disk, self._memory.view, self._changed, clock=clock)
        self._disk = disk
        # Peers reach the memory that a lease or a put opens, and nothing else.
        self._region = engine.register_local_memory(self._memory.view, access=Access.NONE)
        self.readers = LeaseKeys(engine, self._region)
        """The keys that open memory to readers: one per lease."""
        self.writers: dict[int, Grant] = {}
        """The keys that open memory to writers: one per put."""
        self.reads = HotReads(clock())
        self._inspected: set[int] = set()
        """The leases whose reader has complained, while their objects are looked at."""
        self._duties = Background()
        self._next_end = Deadline(asyncio.get_running_loop(), self._sweep)
        """The time at which a lease or a put may be overdue."""
        self._on_change: list[Callable[[], None]] = []
        self.spare: dict[bytes, float] = {}
        """Keys that may have copies elsewhere, at most ``SPARE_MAX``, and when each was copied from or to this node."""
        self.draining = False
        self.leaving = False
        """True while the node takes no puts, because it is to leave; it is still read from."""

    async def start(self) -> None:
        """Finds the objects on the disk, before anybody knows this node."""
        if self._disk is None or self.tier is None:
            return
        began_s = self._clock()
        await asyncio.to_thread(self._disk.recover, self._memory.view)
        log = self._disk.log
        _log.info(
            "found %d objects (%d MiB) on the disk, in %.1f s", len(log), log.used_bytes >> 20, self._clock() - began_s
        )
        self.tier.start()

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
        """Shuts all writers out, and saves what is to be saved. The memory is freed when the engine is closed."""
        self.draining = True
        self._next_end.close()
        for put_id in list(self.writers):
            if self.table.close_put(put_id):
                self._duties.run(self._end(put_id, commit=False), "put end")
        await self._duties.close(END_S)
        await self.readers.close()
        if self.tier is not None:
            await self.tier.close(self._settings.drain_s)
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
        if self.leaving:
            return 0, [PutSlot(SlotState.NO_SPACE)] * len(keys), None  # the putter takes the next node, without blame
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

    def why_no_space(self, tenant: str, object_bytes: int) -> str:
        """Returns why there is no room now for an object of the tenant, for people."""
        if self.leaving:
            return "the node is to leave, and takes no puts"
        return self.table.why_no_space(tenant, object_bytes)

    async def put_end(self, put_id: int, *, commit: bool, checksums: bytes = b"", parts: int = 1) -> int:
        """Ends a put and returns how many objects became readable.

        ``checksums`` are those of all its objects, packed, each with so many ``parts``. Raises :class:`NotFound` for a
        put that ended before, perhaps by its timeout, and :class:`InvalidArgument` for checksums that do not fit."""
        objects = self.table.being_put(put_id)
        if objects is None:
            raise NotFound("no such put; it may have timed out", field="put_id")
        if checksums:
            give_checksums(objects, checksums, parts)
        self.table.close_put(put_id)
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
        if commit:
            await self._compute_checksums(self.table.closing(put_id))
        objects = self.table.closing(put_id)
        committed = self.table.end_put(put_id, commit=commit, now_s=self._clock())
        if committed and self.tier is not None:
            self.tier.stored(objects)
        if committed:
            self._changed()
        return committed

    async def _compute_checksums(self, objects: Sequence[KvObject]) -> None:
        """Gives a checksum to objects that came without one: that protects them from here on."""
        bare = [each for each in objects if not each.checksums]
        for each, found in zip(bare, await self._checksums(bare), strict=True):
            each.checksums = found or b""

    async def _checksums(self, objects: Sequence[KvObject]) -> list[bytes | None]:
        """Returns the checksums of these objects as they are in memory, each with as many parts as it has."""
        if not objects:
            return []
        places = [[self.piece(each)] for each in objects]
        parts = [max(1, len(each.checksums) // CHECKSUM_BYTES) for each in objects]
        return await all_checksums(places, parts, max(each.size for each in objects), self._engine.view)

    # -- reading

    async def acquire(
        self,
        keys: Sequence[bytes],
        lease_s: float,
        *,
        allow_gaps: bool,
        use: Use = Use(),  # noqa: B008  # a value
        patience_s: float = LOAD_S,
    ) -> tuple[Lease, float, RegionDescriptor | None]:
        """Grants a lease. Returns it, its length in seconds and where to read. ``lease_s`` 0 means the default.

        What is only on the disk is read first, for ``patience_s`` at most. The lease gets a key of its own, which opens
        the leased objects for reading until the lease ends."""
        if self.tier is not None:
            await self.tier.load(keys, min(patience_s, LOAD_S), allow_gaps=allow_gaps)
        lease_s = min(lease_s or self._settings.lease_s, self._settings.lease_max_s)
        lease = self.table.acquire(keys, self._clock(), lease_s, allow_gaps=allow_gaps, use=use)
        if not lease.lease_id:
            return lease, 0.0, None
        self.reads.add([held.key for _, held in lease.blocks], self._clock())
        try:
            ranges = [(held.offset, held.size) for _, held in lease.blocks]
            opened = self.readers.give(lease.lease_id, ranges, lease_s)
        except PinyonError:
            self.table.release(lease.lease_id, self._clock())
            raise
        self._sweep_in(lease_s)
        if self.tier is not None:
            self.tier.make_room()
        return lease, lease_s, opened

    def renew(self, lease_id: int, lease_s: float) -> float:
        """Moves the end of a lease; ``lease_s`` 0 means the default. Returns its seconds from now, 0 if it is over."""
        lease_s = min(lease_s or self._settings.lease_s, self._settings.lease_max_s)
        if not self.readers.renew(lease_id, lease_s) or not self.table.renew(lease_id, self._clock(), lease_s):
            return 0.0
        self._sweep_in(lease_s)
        return lease_s

    def release(self, lease_id: int, corrupt: Sequence[int] = ()) -> bool:
        """Ends a lease. Returns False if it ended before. Its objects may be evicted once nobody reads them.

        The reader says which of the lease's objects were ``corrupt`` as they arrived. They are looked at before the
        lease ends, and dropped if it is the copy here that has changed."""
        if lease_id in self._inspected:
            return True
        if corrupt and lease_id in self.readers:
            self._inspected.add(lease_id)
            leased = self.table.leased(lease_id)
            named = [leased[place] for place in sorted(set(corrupt)) if place < len(leased)]
            self._duties.run(self._inspect(lease_id, named), "inspection")
            return True
        return self.readers.end(lease_id, lambda: self._over(lease_id))

    async def _inspect(self, lease_id: int, named: Sequence[KvObject]) -> None:
        """Drops those of the objects whose bytes do not match their checksums, then ends the lease."""
        try:
            found = await self._checksums(named)
            bad = [each.key for each, now in zip(named, found, strict=True) if each.listed and now != each.checksums]
            self.table.counters.corrupt += self.remove(bad)
            if bad:
                _log.error("%d objects have changed in memory and are dropped", len(bad))
        finally:
            self._inspected.discard(lease_id)
            self.release(lease_id)

    def _over(self, lease_id: int) -> None:
        self.table.release(lease_id, self._clock())

    @asynccontextmanager
    async def holding(self, keys: Sequence[bytes]) -> AsyncIterator[list[KvObject]]:
        """Yields those of the objects that are here, which stay meanwhile. It is no use of them."""
        if self.tier is not None:
            await self.tier.load(keys, LOAD_S, allow_gaps=True)
        held = [found for key in keys if (found := self.table.in_memory(key)) is not None]
        self.table.hold(held, self._clock())
        try:
            yield held
        finally:
            self.table.let_go(held, self._clock())

    def piece(self, held: KvObject) -> Piece:
        """Returns where an object lies in the registered memory."""
        return Piece(self._region.key, held.offset, held.size)

    def room(self) -> NodeRoom:
        """Returns what is left here, for those who choose among nodes."""
        table = self.table
        kept = 0 if self.tier is None else int(table.capacity_bytes * FREE_SHARE)
        head = table.eviction.peek(self._clock())
        worth = head[0] if head is not None and isfinite(head[0]) else None
        return NodeRoom(max(0, table.capacity_bytes - table.used_bytes - kept), worth, self.leaving)

    def remove(self, keys: Sequence[bytes]) -> int:
        removed = self.table.remove(keys, self._clock())
        if removed and self.tier is not None:
            self.tier.removed()
        if removed:
            self._changed()
        return removed

    def note_copies(self, keys: Sequence[bytes]) -> None:
        """Takes note that objects are copied from or to this node."""
        self.spare.update(dict.fromkeys(keys, self._clock()))
        while len(self.spare) > SPARE_MAX:
            del self.spare[next(iter(self.spare))]

    def evict(self, keys: Sequence[bytes]) -> int:
        """Evicts those of the objects that may go now, and returns how many."""
        evicted = self.table.evict(keys, self._clock())
        self._changed()
        return evicted

    async def share_pool(self, others_bytes: int) -> None:
        """Takes the capacity of all other live nodes: see :meth:`ObjectTable.share_pool`."""
        while self.table.share_pool(self.table.capacity_bytes + others_bytes, self._clock()):
            self._changed()
            await asyncio.sleep(0)

    # -- for administrators

    async def pin(self, keys: Sequence[bytes], seconds: float) -> list[bytes]:
        """Pins objects for so long (0: without an end), and returns the keys of those that are here.

        What is only on the disk is read first. Raises :class:`ResourceExhausted` if that would be too many bytes."""
        self.table.check_pins(keys)
        if self.tier is not None:
            await self.tier.load(keys, LOAD_S, allow_gaps=True)
        pinned = self.table.pin(keys, self._clock(), self._clock() + (seconds or inf))
        if seconds:
            self._sweep_in(seconds)
        self._changed()
        return pinned

    def unpin(self, keys: Sequence[bytes]) -> list[bytes]:
        return self.table.unpin(keys, self._clock())

    async def drop(self, keys: Sequence[bytes]) -> int:
        """Removes objects, however many, without keeping others waiting. Returns how many there were."""
        dropped = 0
        for start in range(0, len(keys), REMOVED_AT_ONCE):
            dropped += self.remove(keys[start : start + REMOVED_AT_ONCE])
            await asyncio.sleep(0)
        return dropped

    def policy(self, choice: str) -> EvictionPolicy[bytes]:
        """Makes the chosen eviction policy. Raises ``ValueError``."""
        return EVICTION_POLICIES.make(whole_choice(choice, self._clock))

    def switch(self, eviction: EvictionPolicy[bytes]) -> None:
        """Switches the eviction policy: see :meth:`ObjectTable.switch`."""
        self.table.switch(eviction, self._clock())

    # -- time

    def _sweep(self) -> None:
        """Ends the leases, pins and puts that are overdue, and sets the timer for the next ones."""
        now, pause_s = self._clock(), SWEEP_PAUSE_S
        try:
            for lease_id in self.table.overdue_leases(now):
                self.release(lease_id)
            self.table.end_overdue_pins(now)
            for put_id in self.table.close_overdue(now):
                _log.warning("a put timed out; its room is given back")
                self._duties.run(self._end(put_id, commit=False), "put end")
            pause_s = 0.0
        finally:  # also after a defect: without sweeping, overdue leases and puts would fill the pool
            next_s = self.table.next_deadline_s()
            if next_s is not None:
                self._sweep_in(max(pause_s, next_s - now))

    def _sweep_in(self, seconds: float) -> None:
        """Sets the timer for a lease, pin or put that ends in so many seconds, unless another one ends sooner."""
        due = asyncio.get_running_loop().time() + seconds
        if due < self._next_end.due:
            self._next_end.set(due)

    async def wait_puts(self, timeout_s: float) -> None:
        """Waits until no put is open, for so long at most. Nothing new may begin."""
        deadline = self._clock() + timeout_s
        while self.table.open_puts and self._clock() < deadline:  # noqa: ASYNC110  # only while leaving
            await asyncio.sleep(0.02)

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

    def __init__(self, node: StoreNode, *, clock: Clock = time.monotonic) -> None:
        self._node, self._clock = node, clock
        self._changes = node.table.listen()

    def info(self, address: str) -> InstanceInfo:
        """Returns the node's registration. Its capacity in blocks depends on their size, so it is left open."""
        return InstanceInfo(self._node.node_id, self._node.boot_id, Role.STORE, address, zone=self._node.zone)

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

    def news(self) -> conductor_pb2.ReportSessionRequest | None:
        """Reports what was read; a store node computes nothing."""
        over = self._node.reads.take(self._clock())
        if over is None or self._node.leaving:
            return None
        seconds, reads = over
        hot = sum(count for _, count in self._node.reads.hot)
        window = conductor_pb2.WindowReads(window_ms=max(1, round(seconds * 1e3)), reads=reads, hot_reads=hot)
        return conductor_pb2.ReportSessionRequest(reads=window)

    def decoding(self) -> Sequence[str]:
        return ()
