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

from collections.abc import Collection, Mapping, Sequence
from math import inf

from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.eviction.evictor import Evictor
from pinyon.eviction.interface import NO_TRAITS, EvictionPolicy, Known, Refit, Traits, Use, at_once
from pinyon.eviction.ranked import Ranked
from pinyon.paging.key_changes import KeyChanges
from pinyon.paging.leases import LeaseTable
from pinyon.store.allocator import IdleRoom, OffsetAllocator
from pinyon.store.disk_log import DiskLog, DiskObject
from pinyon.store.kv_object import KvObject, Lease, PutSlot, SlotState, TableCounters
from pinyon.store.quotas import TenantQuotas
from pinyon.store.records import Tier

EVICTED_MAX = 16_384
"""The objects that one put may evict: it must not keep others waiting. The next put for the same room goes on."""
VAIN = 4
"""The bytes that an object may evict before any neighbours that make room are taken, cold or not, in times its own."""


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
        disk: DiskLog | None = None,
        quotas: Mapping[str, int | float] | None = None,
        pinned_share: float = 0.5,
    ) -> None:
        """Takes what decides about room, the tier below, if there is one, and the tenants' quotas.

        At most ``pinned_share`` of the bytes may be pinned."""
        self._allocator = allocator
        self.disk = disk
        self.quotas = TenantQuotas(quotas or {}, allocator)
        self.eviction = Evictor(eviction, refit)
        """The evictor, for others to look at."""
        self._leases = leases
        self._max_objects = max_objects
        self._readable: dict[bytes, KvObject] = {}
        self._may_evict = 0
        self._reserved: dict[bytes, KvObject] = {}
        self._puts: LeaseTable[KvObject] = LeaseTable(first_id=first_put_id, max_leases=max_open_puts)
        """The puts that were begun, each with its objects and deadline."""
        self._closing: dict[int, list[KvObject]] = {}
        """The objects of each put whose writer is being shut out."""
        self._max_open_puts = max_open_puts
        self._unlisted = 0  # removed objects that are still being read
        self._idle = IdleRoom(allocator)
        self._lost: list[KvObject] = []
        self.reserved_bytes = 0
        """The bytes of objects that are being put."""
        self.pinned: dict[bytes, KvObject] = {}
        """The objects that stay in memory until they are unpinned; each has one reader for that."""
        self.pinned_bytes = 0
        self._pin_ends: Ranked[bytes] = Ranked()
        self.pinned_max_bytes = int(allocator.capacity_bytes * pinned_share)
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
        *,
        loading: bool = False,
    ) -> tuple[int, list[PutSlot]]:
        """Reserves room for keys that are not here. Returns the put's id (0: nothing reserved) and a slot per key.

        When ``loading``, keys that are on the disk get room, too.

        The keys' places in their prompts, in blocks, are ``offsets``; without them the keys begin a prompt. Raises
        InvalidArgument for objects that could never fit, and ResourceExhausted if too many puts are open."""
        if not 0 < object_bytes <= self._allocator.capacity_bytes:
            raise InvalidArgument(
                f"an object has 1 to {self._allocator.capacity_bytes} bytes here, got {object_bytes}",
                field="object_bytes",
            )
        if not loading and self.open_puts >= self._max_open_puts:
            raise ResourceExhausted(f"{self._max_open_puts} puts are open", retry_after_s=1.0)
        self.eviction.learn(now_s)
        self._may_evict = EVICTED_MAX
        offsets = offsets or range(len(keys))
        # Pinned meanwhile: the put counts on the objects that it found here, so they must not make room for its others.
        self.rescue([held for key in keys if (held := self._readable.get(key)) is not None], now_s)
        kept = {key: offset for key, offset in zip(keys, offsets, strict=True) if key in self.eviction}
        found = [self._readable[key] for key in kept]
        self.hold(found, now_s)
        try:
            self._used(list(kept), now_s, None if traits == NO_TRAITS else traits, list(kept.values()))
            slots, objects = self._reserve(keys, object_bytes, now_s, traits, offsets, loading)
        finally:
            self.let_go(found, now_s)
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
        loading: bool,
    ) -> tuple[list[PutSlot], list[KvObject]]:
        slots: list[PutSlot] = []
        objects: list[KvObject] = []
        for index, (key, place) in enumerate(zip(keys, offsets, strict=True)):
            if key in self._readable or (not loading and key in self):
                slots.append(PutSlot(SlotState.EXISTS))
                continue
            if key in self._reserved:
                slots.append(PutSlot(SlotState.BEING_PUT))
                continue
            excess = self.quotas.excess(traits.tenant, object_bytes)
            if excess is not None and len(excess) > self._may_evict:
                excess = None  # the quota has shrunk: `share_pool` goes on
            self._evict_for_quota(excess or [], now_s)
            offset = None if excess is None else self._make_room(object_bytes, now_s)
            if offset is None:
                self.counters.refused_slots += 1
                self.counters.over_quota += excess is None
                slots.append(PutSlot(SlotState.NO_SPACE))
                continue
            after = keys[index - 1] if index and offsets[index - 1] == place - 1 else None
            made = KvObject(key, offset, object_bytes, traits=traits, place=place, after=after, tenant=traits.tenant)
            self._reserved[key] = made
            self.reserved_bytes += self._allocator.rounded(object_bytes)
            self.quotas.count(made, 1)
            objects.append(made)
            slots.append(PutSlot(SlotState.RESERVED, offset))
        return slots, objects

    def being_put(self, put_id: int) -> list[KvObject] | None:
        """Returns the objects of an open put, in the order of their keys; None if it is unknown, over or closing."""
        return self._puts.items(put_id)

    def close_put(self, put_id: int) -> bool:
        """Begins to end a put. Returns False if it is unknown, over or closing, and so not the caller's to end."""
        objects = self._puts.release(put_id)
        if objects is None:
            return False
        self._closing[put_id] = objects
        return True

    def closing(self, put_id: int) -> list[KvObject]:
        """Returns the objects of a closing put, in the order of their keys."""
        return self._closing[put_id]

    def close_overdue(self, now_s: float) -> list[int]:
        """Begins to end the puts whose time is up and returns their ids; the caller ends them."""
        overdue = [put_id for put_id in self._puts.overdue(now_s) if self.close_put(put_id)]
        self.counters.expired_puts += len(overdue)
        return overdue

    def end_put(
        self, put_id: int, *, commit: bool, now_s: float, lost: bool = False, without: Collection[bytes] = ()
    ) -> int:
        """Ends a closing put whose writer is shut out: its objects become readable, or their room becomes free.

        With ``lost``, the writer was not shut out, so the room is never used again. The room of the keys ``without`` an
        object becomes free in any case. Returns how many became readable. Raises ``ValueError`` if the put is not
        closing."""
        objects = self._closing.pop(put_id, None)
        if objects is None:
            raise ValueError(f"put {put_id} is not closing")
        for each in objects:
            del self._reserved[each.key]
            self.reserved_bytes -= self._allocator.rounded(each.size)
        if lost:
            self._lost += objects
            for each in objects:
                self.quotas.count(each, -1)
            return 0
        for each in objects:
            if not commit or each.key in without:
                each.listed = False
                self._free(each)
        objects = [each for each in objects if each.listed]
        for each in objects:
            below = each.key in self  # it was read from the disk
            self._readable[each.key] = each
            each.used_s = now_s
            self.note(each.key, before=below)
            self._idle.add(each.key, each.offset, each.size)
            self.counters.stored_bytes += 0 if below else each.size
            self.counters.stored += not below
            self.counters.promoted += below
        self._tell_stored(objects, now_s)
        self.quotas.idle(reversed(objects))
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
        self.counters.leased_bytes += sum([held.size for _, held in found])
        objects = [held for _, held in found]
        self.rescue(objects, now_s)
        self.hold(objects, now_s)
        self._used([held.key for _, held in found], now_s, use.traits, [use.first + index for index, _ in found])
        return Lease(lease_id, found)

    def hold(self, objects: Sequence[KvObject], now_s: float) -> None:
        """Keeps readable objects in their places until :meth:`let_go`, as a lease does."""
        idle: list[bytes] = []
        self.quotas.busy(objects)
        for held in objects:
            if not held.readers and not held.demoting:
                idle.append(held.key)
                self._idle.take(held.offset)
            held.readers += 1
        self.eviction.pinned(idle, now_s)

    def _used(self, keys: Sequence[bytes], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        """Notes a use by a request with these traits; None if they are not known."""
        self.eviction.used(keys, now_s, traits, offsets)
        for key in keys:
            held = self._readable[key]
            held.used_s = now_s
            if traits is not None:
                held.traits = traits

    def leased(self, lease_id: int) -> list[KvObject]:
        """Returns the objects of a lease, in the order of their keys; none if it ended before."""
        return self._leases.items(lease_id) or []

    def renew(self, lease_id: int, now_s: float, lease_s: float) -> bool:
        """Moves the end of a lease to ``lease_s`` seconds from now. Returns False if it is over."""
        return self._leases.renew(lease_id, now_s, lease_s)

    def release(self, lease_id: int, now_s: float) -> bool:
        """Ends a lease. Returns False if it ended before."""
        objects = self._leases.release(lease_id)
        if objects is None:
            return False
        self.let_go(objects, now_s)
        return True

    def overdue_leases(self, now_s: float) -> list[int]:
        """Returns the leases whose time is up, each once; the caller shuts readers out and calls :meth:`release`."""
        overdue = self._leases.overdue(now_s)
        self.counters.expired_leases += len(overdue)
        return overdue

    def let_go(self, objects: Sequence[KvObject], now_s: float) -> None:
        """Gives objects back that were held, by a lease or otherwise."""
        idle: list[KvObject] = []
        for held in objects:
            held.readers -= 1
            if held.readers:
                continue
            if held.listed:
                idle.append(held)
            else:
                self._unlisted -= 1
                self._free(held)
        self.quotas.idle(reversed(idle))
        idle = [held for held in idle if not held.demoting]
        for held in idle:
            self._idle.add(held.key, held.offset, held.size)
        self.eviction.unpinned([held.key for held in idle], now_s)

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
        return [key in self for key in keys]

    # -- removing

    def remove(self, keys: Sequence[bytes], now_s: float = 0.0) -> int:
        """Forgets readable objects and returns how many; those being read disappear with their last lease."""
        removed = 0
        for key in keys:
            below = self.disk is not None and self.disk.remove(key)
            held = self._readable.get(key)
            if held is not None:
                if not held.demoting:
                    self.eviction.dropped((key,), now_s)
                self._unlist(held)
                self.unpin((key,), now_s)
            elif below:
                self.note(key, before=True)
            removed += held is not None or below
        return removed

    def _unlist(self, held: KvObject) -> None:
        del self._readable[held.key]
        held.listed = False
        self.note(held.key, before=True)
        if held.readers:
            self._unlisted += 1
        else:
            if not held.demoting:
                self._idle.take(held.offset)
            self.quotas.busy([held])
            self._free(held)

    def _free(self, held: KvObject) -> None:
        self.quotas.count(held, -1)
        self._allocator.free(held.offset)

    # -- pins

    def check_pins(self, keys: Sequence[bytes]) -> None:
        """Raises :class:`ResourceExhausted` if too many bytes would be pinned with those of these keys."""
        entries = [self.entry(key) for key in set(keys) if key not in self.pinned]
        more = sum([self._allocator.rounded(entry[0]) for entry in entries if entry is not None])
        if self.pinned_bytes + more > self.pinned_max_bytes:
            raise ResourceExhausted(
                f"these take {more} bytes that are not pinned yet; {self.pinned_bytes} are, "
                f"and at most {self.pinned_max_bytes} may be"
            )

    def pin(self, keys: Sequence[bytes], now_s: float, end_s: float) -> list[bytes]:
        """Keeps objects in memory from eviction until ``end_s``, or infinity. Returns the keys of those in memory.

        An earlier pin gets this end. Pins nothing and raises :class:`ResourceExhausted` where that is too much."""
        self.check_pins(keys)
        found = [held for key in dict.fromkeys(keys) if (held := self._readable.get(key)) is not None]
        fresh = [held for held in found if held.key not in self.pinned]
        self.rescue(fresh, now_s)
        self.hold(fresh, now_s)
        self.pinned_bytes += sum([self._allocator.rounded(held.size) for held in fresh])
        for held in found:
            self.pinned[held.key] = held
            self._pin_ends.put(held.key, (end_s,))
        return [held.key for held in found]

    def unpin(self, keys: Sequence[bytes], now_s: float) -> list[bytes]:
        """Lets pinned objects be evicted again. Returns the keys of those that were pinned."""
        taken = [held for key in keys if (held := self.pinned.pop(key, None)) is not None]
        for held in taken:
            self._pin_ends.take(held.key)
            self.pinned_bytes -= self._allocator.rounded(held.size)
        self.let_go(taken, now_s)
        return [held.key for held in taken]

    def end_overdue_pins(self, now_s: float) -> None:
        while (first := self._pin_ends.first()) is not None and first[0][0] <= now_s:
            self.unpin((first[1],), now_s)

    # -- the tier below

    def demote(self, now_s: float) -> KvObject | None:
        """Chooses the next object to evict, which stays readable until :meth:`demoted`; None if nothing may go."""
        for key in self.eviction.victims(1, now_s):
            held = self._readable[key]
            held.demoting = True
            self._idle.take(held.offset)
            return held
        return None

    def demoted(self, held: KvObject) -> None:
        """Evicts an object that was chosen, unless it was used meanwhile."""
        if held.demoting and held.listed:
            self._evict(held)

    def _evict(self, held: KvObject) -> None:
        self.counters.unsaved += self.disk is not None and held.key not in self.disk
        self._unlist(held)

    def _evict_for_quota(self, objects: Sequence[KvObject], now_s: float) -> None:
        self._may_evict -= len(objects)
        for held in objects:
            if not held.demoting:
                self.eviction.evict([held.key], now_s)
            self.quotas.evicted[self.quotas.label(held.tenant)] += 1
            self._evict(held)

    def share_pool(self, pool_bytes: int, now_s: float) -> bool:
        """Takes the capacity of all live nodes, of which quotas in bytes are divided. Returns whether objects went.

        At most ``EVICTED_MAX`` go at once; call it until none goes."""
        self.quotas.pool_bytes = pool_bytes
        objects = [each for tenant in self.quotas.accounts for each in self.quotas.excess(tenant) or ()][:EVICTED_MAX]
        self._evict_for_quota(objects, now_s)
        return bool(objects)

    def rescue(self, objects: Sequence[KvObject], now_s: float) -> None:
        """Lets objects stay that were being demoted."""
        for held in objects:
            if held.demoting:
                held.demoting = False
                self.eviction.stored([held.key], now_s, held.traits, [held.place])
                if held.readers:
                    self.eviction.pinned([held.key], now_s)
                else:
                    self._idle.add(held.key, held.offset, held.size)

    def _make_room(self, object_bytes: int, now_s: float) -> int | None:
        """Returns an offset, evicting objects that nobody reads, or None. Evicts nothing if that cannot make room.

        An object needs one piece: many idle objects between others that are being read may be of no use. The coldest
        object goes, and as many of its neighbours as it takes. Where these cannot go, it alone goes, then the next
        coldest, until ``VAIN`` times the bytes went in vain. In all, at most ``VAIN`` + 1 times the object's bytes go,
        and twice the largest object; ``EVICTED_MAX`` objects for all objects of a put."""
        allocator, needed, vain = self._allocator, self._allocator.rounded(object_bytes), 0
        full = len(self._readable) + len(self._reserved) >= self._max_objects
        if not full and (offset := allocator.allocate(object_bytes)) is not None:
            return offset
        possible = needed <= max(allocator.largest_hole_bytes, self._idle.largest_bytes)
        vain_max = VAIN * needed if possible else 0
        while vain < vain_max and self._may_evict > 0 and (victims := self.eviction.victims(1, now_s)):
            coldest, keys = self._readable[victims[0]], victims
            if coldest.size < object_bytes and allocator.largest_hole_bytes < needed:
                run, room = self._idle.run(coldest.offset, needed)
                if room >= needed:
                    keys = run[: self._may_evict]
                    self.eviction.evict(keys[1:], now_s)
            vain += self._evict_all(keys)
            if (offset := allocator.allocate(object_bytes)) is not None:
                return offset
        if self._may_evict <= 0:
            return None
        keys = self._idle.any_run(needed, now_s, believe=not vain)[: self._may_evict]
        self.eviction.evict(keys, now_s)
        self._evict_all(keys)
        return allocator.allocate(object_bytes) if keys else None

    def evict(self, keys: Sequence[bytes], now_s: float) -> int:
        """Evicts those of the objects that may go now, whatever the policy would choose; returns how many."""
        going = [key for key in keys if key in self.eviction]
        self.eviction.evict(going, now_s)
        self._evict_all(going)
        return len(going)

    def _evict_all(self, keys: Sequence[bytes]) -> int:
        """Evicts objects that the policy knows of no more; returns their bytes."""
        before = self.used_bytes
        self._may_evict -= len(keys)
        for key in keys:
            self._evict(self._readable[key])
        return before - self.used_bytes

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

    def note(self, key: bytes, *, before: bool) -> None:
        """Tells the listeners that an object came, went, or changed its tier: whether it was readable ``before``."""
        now = key in self
        for changes in self._listeners:
            if before and now:
                changes.change(key)
            elif now:
                changes.add(key)
            elif before:
                changes.remove(key)

    def keys(self) -> list[bytes]:
        """Returns all readable keys."""
        below = [] if self.disk is None else [key for key in self.disk if key not in self._readable]
        return [*self._readable, *below]

    def entry(self, key: bytes) -> tuple[int, Tier, str] | None:
        """Returns a readable object's size in bytes, tier and tenant; None if the key is not readable."""
        held = self._readable.get(key)
        if held is not None:
            return held.size, Tier.MEMORY, held.tenant
        below = None if self.disk is None else self.disk.find(key)
        return None if below is None else (below.size, Tier.DISK, below.traits.tenant)

    def snapshot(self, keys: Sequence[bytes] | None = None) -> tuple[list[KvObject], list[DiskObject]]:
        """Returns the objects in memory and those on the disk, which may be the same; or those of these keys."""
        wanted = self.keys() if keys is None else dict.fromkeys(keys)
        below = [] if self.disk is None else [found for key in wanted if (found := self.disk.find(key)) is not None]
        return [held for key in wanted if (held := self._readable.get(key)) is not None], below

    def in_memory(self, key: bytes) -> KvObject | None:
        """Returns a readable object that is in memory."""
        return self._readable.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._readable or (self.disk is not None and key in self.disk)

    def __len__(self) -> int:
        """Returns the number of objects in memory."""
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
    def leased_bytes(self) -> int:
        """The bytes of objects that may not go now, because they are read or being saved."""
        return self.used_bytes - self._idle.all_bytes - self.reserved_bytes - self.lost_bytes

    def why_no_space(self, tenant: str, object_bytes: int) -> str:
        """Returns why there is no room now for an object of the tenant, for people."""
        excess = self.quotas.excess(tenant, object_bytes)
        if excess is None or len(excess) > EVICTED_MAX:  # as in :meth:`_reserve`
            limit = self.quotas.limit(tenant)
            return f"tenant {tenant!r} may hold {limit} bytes here, and too few of its objects may go now"
        return (
            f"no piece of {object_bytes} bytes is free or may become so: of {self.capacity_bytes} bytes, "
            f"{self.leased_bytes} are leased or pinned ({self.pinned_bytes} pinned), {self.reserved_bytes} being put "
            f"and {self.lost_bytes} lost"
        )

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
        pinned = sum(held.readers == 1 for held in self.pinned.values())
        return len(self._readable) - len(self.eviction) + self._unlisted - pinned

    @property
    def still_read(self) -> int:
        """The number of removed objects that are still being read."""
        return self._unlisted

    @property
    def reserved_objects(self) -> int:
        return len(self._reserved)

    def next_deadline_s(self) -> float | None:
        """Returns the earliest time at which a lease, a put or a pin may be overdue."""
        pin = self._pin_ends.first()
        times = (self._puts.next_deadline(), self._leases.next_deadline(), None if pin is None else pin[0][0])
        return min((time_s for time_s in times if time_s is not None and time_s < inf), default=None)
