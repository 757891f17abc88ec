"""The content of a store node: KV objects in a pool of bytes, puts on the way in, leases on the way out. Pure.

::

    put_start ──▶ reserved ──end_put(commit)──▶ readable ──evicted, removed──▶ gone
                     │                             ▲  │
                     └─────── end_put(give up)     └──┘ acquire / release (leased: never evicted)

A reservation ends in two steps. First the put is *closing*: no PutEnd counts any more, and the edge shuts the writer
out of the memory (it revokes the key that only this put was given). Only then :meth:`ObjectTable.end_put` makes the
room readable or free. So a late write can hit neither a readable object nor another reservation.

A lease ends likewise: its key is refused and the reads under way are over before :meth:`ObjectTable.release`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.eviction.evictor import Evictor
from pinyon.eviction.interface import NO_TRAITS, EvictionPolicy, Known, Refit, Traits, Use, at_once
from pinyon.paging.key_changes import KeyChanges
from pinyon.paging.leases import LeaseTable
from pinyon.store.allocator import IdleRoom, OffsetAllocator
from pinyon.store.kv_object import KvObject, Lease, PutSlot, SlotState, TableCounters


class ObjectTable:
    """The table of a store node's objects. It is not thread-safe and has one owner.

    Times are monotonic seconds; ids are unique for the life of the table."""

    def __init__(
        self,
        allocator: OffsetAllocator,
        eviction: EvictionPolicy[bytes],
        leases: LeaseTable[KvObject],
        *,
        first_put_id: int = 1,
        max_open_puts: int = 1024,
        max_objects: int = 1 << 20,
        refit: Refit = at_once,
    ) -> None:
        self._allocator = allocator
        self.eviction = Evictor(eviction, refit)
        """The evictor, for others to look at."""
        self._leases = leases
        self._max_objects = max_objects
        self._readable: dict[bytes, KvObject] = {}
        self._reserved: dict[bytes, KvObject] = {}
        self._puts: LeaseTable[KvObject] = LeaseTable(first_id=first_put_id, max_leases=max_open_puts)
        """The puts that were begun, each with its objects and deadline."""
        self._closing: dict[int, list[KvObject]] = {}
        """The objects of each put whose writer is being shut out."""
        self._max_open_puts = max_open_puts
        self._unlisted = 0  # removed objects that are still being read
        self._idle = IdleRoom(allocator)
        self._lost: list[KvObject] = []
        self._listeners: list[KeyChanges] = []
        self.counters = TableCounters()

    # -- puts

    def put_start(
        self,
        keys: Sequence[bytes],
        object_bytes: int,
        now_s: float,
        timeout_s: float,
        traits: Traits = NO_TRAITS,
        offsets: Sequence[int] = (),
    ) -> tuple[int, list[PutSlot]]:
        """Reserves room for keys that are not here. Returns the put's id (0: nothing reserved) and a slot per key.

        The keys' places in their prompts, in blocks, are ``offsets``; without them the keys begin a prompt. Raises
        InvalidArgument for objects that could never fit, and ResourceExhausted if too many puts are open."""
        if not 0 < object_bytes <= self._allocator.capacity_bytes:
            raise InvalidArgument(
                f"an object has 1 to {self._allocator.capacity_bytes} bytes here, got {object_bytes}",
                field="object_bytes",
            )
        if self.open_puts >= self._max_open_puts:
            raise ResourceExhausted(f"{self._max_open_puts} puts are open", retry_after_s=1.0)
        self.eviction.learn(now_s)
        offsets = offsets or range(len(keys))
        # Pinned meanwhile: the put counts on the objects that it found here, so they must not make room for its others.
        kept = {key: offset for key, offset in zip(keys, offsets, strict=True) if key in self.eviction}
        self.eviction.pinned(list(kept), now_s)
        try:
            self._used(list(kept), now_s, None if traits == NO_TRAITS else traits, list(kept.values()))
            slots, objects = self._reserve(keys, object_bytes, now_s, traits, offsets, kept)
        finally:
            self.eviction.unpinned(list(kept), now_s)
        if not objects:
            return 0, slots
        return self._puts.grant(objects, now_s, timeout_s), slots

    def _reserve(
        self,
        keys: Sequence[bytes],
        object_bytes: int,
        now_s: float,
        traits: Traits,
        offsets: Sequence[int],
        kept: Collection[bytes],
    ) -> tuple[list[PutSlot], list[KvObject]]:
        slots: list[PutSlot] = []
        objects: list[KvObject] = []
        for index, (key, place) in enumerate(zip(keys, offsets, strict=True)):
            if key in self._readable:
                slots.append(PutSlot(SlotState.EXISTS))
                continue
            if key in self._reserved:
                slots.append(PutSlot(SlotState.BEING_PUT))
                continue
            offset = self._make_room(object_bytes, now_s, kept)
            if offset is None:
                self.counters.refused_slots += 1
                slots.append(PutSlot(SlotState.NO_SPACE))
                continue
            after = keys[index - 1] if index and offsets[index - 1] == place - 1 else None
            made = KvObject(key, offset, object_bytes, traits=traits, place=place, after=after)
            self._reserved[key] = made
            objects.append(made)
            slots.append(PutSlot(SlotState.RESERVED, offset))
        return slots, objects

    def close_put(self, put_id: int) -> bool:
        """Begins to end a put. Returns False if it is unknown, over or closing, and so not the caller's to end."""
        objects = self._puts.release(put_id)
        if objects is None:
            return False
        self._closing[put_id] = objects
        return True

    def close_overdue(self, now_s: float) -> list[int]:
        """Begins to end the puts whose time is up and returns their ids; the caller ends them."""
        overdue = [put_id for put_id in self._puts.overdue(now_s) if self.close_put(put_id)]
        self.counters.expired_puts += len(overdue)
        return overdue

    def end_put(self, put_id: int, *, commit: bool, now_s: float, lost: bool = False) -> int:
        """Ends a closing put whose writer is shut out: its objects become readable, or their room becomes free.

        With ``lost``, the writer was not shut out, so the room is never used again. Returns how many became readable.
        Raises ``ValueError`` if the put is not closing."""
        objects = self._closing.pop(put_id, None)
        if objects is None:
            raise ValueError(f"put {put_id} is not closing")
        for each in objects:
            del self._reserved[each.key]
        if lost:
            self._lost += objects
            return 0
        if not commit:
            for each in objects:
                each.listed = False
                self._allocator.free(each.offset)
            return 0
        for each in objects:
            self._readable[each.key] = each
            self._note(each.key, stored=True)
            self._idle.count(each.size, 1)
            self.counters.stored_bytes += each.size
        self._tell_stored(objects, now_s)
        self.counters.stored += len(objects)
        return len(objects)

    # -- reading

    def acquire(
        self,
        keys: Sequence[bytes],
        now_s: float,
        lease_s: float,
        *,
        allow_gaps: bool = False,
        use: Use = Use(),  # noqa: B008  # a value
    ) -> Lease:
        """Grants a lease on the leading run of readable keys, or with ``allow_gaps`` on every readable key.

        The traits and the first block of the request are in ``use``. Raises :class:`ResourceExhausted` if too many
        leases are held."""
        found: list[tuple[int, KvObject]] = []
        for index, key in enumerate(keys):
            held = self._readable.get(key)
            if held is not None:
                found.append((index, held))
            elif not allow_gaps:
                break
        self.counters.hits += len(found)
        self.counters.misses += len(keys) - len(found)
        if not found:
            return Lease(0, [])
        lease_id = self._leases.grant((held for _, held in found), now_s, lease_s)
        idle: list[bytes] = []
        for _, held in found:
            if not held.readers:
                idle.append(held.key)
                self._idle.count(held.size, -1)
            held.readers += 1
            self.counters.leased_bytes += held.size
        self.eviction.pinned(idle, now_s)
        self._used([held.key for _, held in found], now_s, use.traits, [use.first + index for index, _ in found])
        return Lease(lease_id, found)

    def _used(self, keys: Sequence[bytes], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        """Notes a use by a request with these traits; None if they are not known."""
        self.eviction.used(keys, now_s, traits, offsets)
        if traits is not None:
            for key in keys:
                self._readable[key].traits = traits

    def release(self, lease_id: int, now_s: float) -> bool:
        """Ends a lease. Returns False if it ended before."""
        objects = self._leases.release(lease_id)
        if objects is None:
            return False
        self._unread(objects, now_s)
        return True

    def overdue_leases(self, now_s: float) -> list[int]:
        """Returns the leases whose time is up, each once; the caller shuts readers out and calls :meth:`release`."""
        overdue = self._leases.overdue(now_s)
        self.counters.expired_leases += len(overdue)
        return overdue

    def _unread(self, objects: list[KvObject], now_s: float) -> None:
        idle: list[bytes] = []
        for held in objects:
            held.readers -= 1
            if held.readers:
                continue
            if held.listed:
                self._idle.count(held.size, 1)
                idle.append(held.key)
            else:
                self._unlisted -= 1
                self._allocator.free(held.offset)
        self.eviction.unpinned(idle, now_s)

    def _tell_stored(self, objects: Sequence[KvObject], now_s: float) -> None:
        """Tells the eviction policy of one put's objects, which have the same traits: run by run, the last first."""
        end = len(objects)
        for start in range(end - 1, -1, -1):
            if start and objects[start].after == objects[start - 1].key:
                continue
            run, traits, after = objects[start:end], objects[start].traits, objects[start].after
            self.eviction.stored([each.key for each in run], now_s, traits, [each.place for each in run], after)
            end = start

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns which keys can be read here; a key that is still being put cannot."""
        return [key in self._readable for key in keys]

    # -- removing

    def remove(self, keys: Sequence[bytes], now_s: float = 0.0) -> int:
        """Forgets readable objects and returns how many; those being read disappear with their last lease."""
        removed = 0
        for key in keys:
            held = self._readable.get(key)
            if held is None:
                continue
            self.eviction.dropped((key,), now_s)
            self._unlist(held)
            removed += 1
        return removed

    def _unlist(self, held: KvObject) -> None:
        del self._readable[held.key]
        held.listed = False
        self._note(held.key, stored=False)
        if held.readers:
            self._unlisted += 1
        else:
            self._idle.count(held.size, -1)
            self._allocator.free(held.offset)

    def _make_room(self, object_bytes: int, now_s: float, kept: Collection[bytes]) -> int | None:
        """Returns an offset, evicting objects that nobody reads, or None. Evicts nothing if that cannot make room.

        An object needs one piece: many idle objects between others that are being read may be of no use."""
        allocator = self._allocator
        needed = allocator.rounded(object_bytes)
        full = len(self._readable) + len(self._reserved) >= self._max_objects
        offset = None if full else allocator.allocate(object_bytes)
        if offset is not None:
            return offset
        if needed > max(allocator.largest_hole_bytes, self._idle.largest_bytes):  # several neighbours must go
            every = self._readable.values()
            idle = ((held.offset, held.key) for held in every if not held.readers and held.key not in kept)
            beside = self._idle.side_by_side(object_bytes, now_s, idle)
            self.eviction.evict(beside, now_s)
            for key in beside:
                self._unlist(self._readable[key])
            return allocator.allocate(object_bytes)
        while victims := self.eviction.victims(1, now_s):
            self._unlist(self._readable[victims[0]])
            offset = allocator.allocate(object_bytes)
            if offset is not None:
                return offset
        return None

    def switch(self, eviction: EvictionPolicy[bytes], now_s: float) -> None:
        """Lets this policy choose what to evict from now on. See :meth:`pinyon.paging.BlockPool.switch`."""
        read = [held.key for held in self._readable.values() if held.readers]
        self.eviction.switch(eviction, read, self._known_of, now_s)

    def _known_of(self, key: bytes) -> Known:
        held = self._readable[key]
        return Known(held.traits, held.place, held.after)

    # -- telling others

    def listen(self) -> KeyChanges:
        """Returns the changes of readable keys from now on, for one listener to drain."""
        changes = KeyChanges()
        self._listeners.append(changes)
        return changes

    def _note(self, key: bytes, *, stored: bool) -> None:
        for changes in self._listeners:
            if stored:
                changes.add(key)
            else:
                changes.remove(key)

    def keys(self) -> list[bytes]:
        """Returns all readable keys."""
        return list(self._readable)

    def size_of(self, key: bytes) -> int | None:
        """Returns the size in bytes of a readable object, None if the key is not readable."""
        held = self._readable.get(key)
        return None if held is None else held.size

    def __len__(self) -> int:
        return len(self._readable)

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes taken by objects, reservations and lost room."""
        return self._allocator.used_bytes

    @property
    def lost_bytes(self) -> int:
        return sum(self._allocator.rounded(each.size) for each in self._lost)

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def open_puts(self) -> int:
        """The number of puts that were begun and not ended, including those that are closing."""
        return len(self._puts) + len(self._closing)

    @property
    def idle_objects(self) -> int:
        """The number of objects that are readable and read by nobody, so that they may be evicted."""
        return len(self.eviction)

    @property
    def leased_objects(self) -> int:
        """The number of objects that are being read, including removed ones."""
        return len(self._readable) - len(self.eviction) + self._unlisted

    @property
    def reserved_objects(self) -> int:
        return len(self._reserved)

    def next_deadline_s(self) -> float | None:
        """Returns the earliest time at which a lease or a put may be overdue."""
        times = (self._puts.next_deadline(), self._leases.next_deadline())
        return min((time_s for time_s in times if time_s is not None), default=None)
