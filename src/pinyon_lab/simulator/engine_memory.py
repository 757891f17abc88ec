"""The KV memory of a simulated engine: reserved, published and leased blocks, and copies between its tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.batching import BatchRequest
from pinyon.core.block_keys import BlockKey
from pinyon.decisions import InstanceDecisions, RoomWaits
from pinyon.paging import Reservation
from pinyon_lab.simulator.attempt import Attempt
from pinyon_lab.simulator.virtual_time import VirtualTime


class EngineMemory:
    """The KV memory of an engine. A derived class says when a step is under way, and is told when there may be work."""

    def __init__(self, time: VirtualTime, decisions: InstanceDecisions, block_bytes: int, dram_bytes_s: float) -> None:
        self.pool, self.reservations = decisions.pool, decisions.reservations
        self.admission = decisions.admission
        self.room_waits = RoomWaits()
        self.alive = True
        self._time = time
        self._block_bytes = block_bytes
        self._dram_bytes_s = dram_bytes_s
        self._wanted: dict[int, Callable[[Reservation], None]] = {}
        self._after_step: list[tuple[int, list[int]]] = []
        self._expiry_s: float | None = None
        self._swapped_s = 0.0
        """The time at which all copies between the tiers are done."""

    @property
    def stepping(self) -> bool:
        """True while a step is under way, which may still touch blocks that are given back."""
        raise NotImplementedError

    def kick(self) -> None:
        """Says that there may be work for a step."""
        raise NotImplementedError

    # -- room

    def want(self, request: BatchRequest, then: Callable[[Reservation], None], *, new: bool = True) -> None:
        """Queues a request for KV blocks; :meth:`settle` passes them to ``then``. Not ``new``: it was preempted."""
        self._wanted[request.number] = then
        if new:
            self.room_waits.began(request.number, self._time.now_s)
        self.admission.enqueue(request)

    def unwant(self, number: int) -> None:
        """Ends the wait of a request for room, if it waits."""
        if self._wanted.pop(number, None) is not None:
            self.room_waits.left(number, self._time.now_s)
            self.admission.withdraw(number)
            self.settle()

    def wants(self, number: int) -> bool:
        return number in self._wanted

    def settle(self) -> None:
        """Gives blocks to the requests that can have them: some may have become free, or a new request waits."""
        for number, reservation, _ in self.admission.admit(self._time.now_s):
            self.room_waits.granted(number, self._time.now_s)
            self._wanted.pop(number)(reservation)

    def free(self, number: int, table: list[int]) -> None:
        """Frees blocks of the request ``number``, or surplus blocks if it is 0. As in a worker, blocks are freed only
        when the step that may still touch them is over."""
        if self.stepping:
            self._after_step.append((number, table))
            self.kick()
            return
        self.give_way(number, table)
        self.settle()

    def grow(self, number: int, count: int) -> list[int] | None:
        """Implements :class:`pinyon.decisions.Room`."""
        return self.admission.grow(number, count, self._time.now_s)

    def free_late(self) -> None:
        """Frees the blocks that were given back during the step that has ended."""
        tables, self._after_step = self._after_step, []
        for number, table in tables:
            self.give_way(number, table)
        self.settle()

    def give_way(self, number: int, table: list[int]) -> None:
        """Implements :class:`pinyon.decisions.Room`."""
        if number:
            self.admission.end(number)
        self.reservations.release(table, self._time.now_s)

    def publish(self, attempt: Attempt, room: Reservation, first: int, last: int) -> None:
        """Publishes the request's blocks ``[first, last)``, whose content is complete. Where the pool holds the same
        content already, that block replaces the room's own, which is freed."""
        request = attempt.request
        keys = request.keys[first:last]
        if not keys:
            return
        after = request.keys[first - 1] if first else None
        duplicates = []
        blocks = room.table[first : first + len(keys)]
        for index, block in self.reservations.publish(
            blocks, keys, self._time.now_s, request.traits, first=first, after=after
        ):
            duplicates.append(room.table[first + index])
            room.table[first + index] = block
        if duplicates:
            self.free(0, duplicates)

    def copies_s(self) -> float:
        """Returns the seconds until all copies between the tiers are done, with those that just became necessary."""
        now_s = self._time.now_s
        swaps = self.reservations.take_swaps()
        if swaps:
            out = sum(swap.out >= 0 for swap in swaps)
            copied = out + sum(swap.into >= 0 for swap in swaps)
            self._swapped_s = max(self._swapped_s, now_s) + copied * self._block_bytes / self._dram_bytes_s
            if out:
                self._time.at(self._swapped_s, lambda: self.reservations.swapped(out))
        return max(0.0, self._swapped_s - now_s)

    # -- leases

    def lease(self, keys: Sequence[BlockKey], duration_s: float) -> tuple[int, int]:
        """Puts a lease on the leading keys that are held; returns the lease and the number of those keys."""
        lease, found = self.reservations.lease(keys, duration_s, self._time.now_s, False)
        self._watch_leases()
        return lease, len(found)

    def end_lease(self, lease: int) -> None:
        if self.alive and self.reservations.end_lease(lease, self._time.now_s):
            self.settle()
            self.kick()

    def _watch_leases(self) -> None:
        deadline_s = self.reservations.next_deadline()
        if deadline_s is not None and self._expiry_s is None:
            self._expiry_s = max(deadline_s, self._time.now_s)
            self._time.at(self._expiry_s, self._expire)

    def _expire(self) -> None:
        self._expiry_s = None
        if self.alive:
            for lease in self.reservations.overdue(self._time.now_s):
                self.reservations.end_lease(lease, self._time.now_s)
            self.settle()
            self._watch_leases()
            self.kick()
