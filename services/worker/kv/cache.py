"""The worker's KV blocks: :class:`pinyon.paging.Reservations` with futures for who waits and a timer for leases."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.eviction import NO_TRAITS, Traits
from pinyon.paging import BlockPool, Grant, Reservation, Reservations
from pinyon.store.lease_keys import LeaseKeys
from pinyon.transfer import RegionDescriptor

__all__ = ["KvCache"]


class KvCache:
    """Owned by the event loop's thread."""

    def __init__(
        self, layout: KvLayout, pool: BlockPool, reservations: Reservations, keys: LeaseKeys, clock: Clock
    ) -> None:
        """``keys``: by which peers read what they leased."""
        self.layout = layout
        self._keys = keys
        self.pool = pool
        """To look at: whatever changes it goes through the reservations."""
        self._reservations = reservations
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reservation]] = {}
        self._number_of: dict[asyncio.Future[Reservation], int] = {}
        self._lease_timer: asyncio.TimerHandle | None = None
        self._lease_timer_s = math.inf
        """When it is due, by the clock."""
        self._asking_back = False
        self.on_shortage: Callable[[], None] | None = None
        """Called when somebody waits for room, here or after something was released: to release what is held only for
        later."""
        self.on_published: Callable[[Sequence[int]], None] | None = None
        """Called with blocks that have new content."""

    # -- figures

    @property
    def waiting(self) -> int:
        """Reservations that wait for room."""
        return self._reservations.waiting

    @property
    def leases(self) -> int:
        return self._reservations.leases

    # -- reservations

    def reserve(self, keys: Sequence[BlockKey], total: int) -> asyncio.Future[Reservation]:
        """See :meth:`Reservations.reserve`. The future is done at once if there is room and nobody waits."""
        number = next(self._numbers)
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        grants = self._reservations.reserve(number, keys, total, self._clock())
        self._waiting[number] = future
        self._number_of[future] = number
        self._give(grants)
        return future

    def withdraw(self, future: asyncio.Future[Reservation]) -> None:
        """The reservation is not wanted any more, whether it was granted meanwhile or not."""
        if future.cancel():
            number = self._number_of.pop(future)
            del self._waiting[number]
            self._give(self._reservations.withdraw(number, self._clock()))
        elif not future.cancelled():
            self.release(future.result().table)

    def _give(self, grants: Iterable[Grant]) -> None:
        for number, reservation in grants:
            future = self._waiting.pop(number)
            del self._number_of[future]
            future.set_result(reservation)
        if self.on_shortage is not None and self._reservations.waiting and not self._asking_back:
            self._asking_back = True  # what it releases comes back to here
            try:
                self.on_shortage()
            finally:
                self._asking_back = False

    def extend(self, reservation: Reservation, keys: Sequence[BlockKey]) -> None:
        """See :meth:`Reservations.extend`."""
        self._give(self._reservations.extend(reservation, keys, self._clock()))

    def publish(
        self, table: list[int], keys: Sequence[BlockKey], traits: Traits = NO_TRAITS, first: int = 0
    ) -> list[int]:
        """The blocks of a table from ``first`` on, one per key, are complete: see :meth:`Reservations.publish`.

        Where others hold the same content, their blocks take the places in the table. Returns the duplicates: to be
        released when nobody reads them any more. Not to be called while a step has the table.
        """
        blocks = table[first : first + len(keys)]
        if self.on_published is not None:
            self.on_published(blocks)
        duplicates: list[int] = []
        for index, block in self._reservations.publish(blocks, keys, traits, first):
            duplicates.append(table[first + index])
            table[first + index] = block
        return duplicates

    def hold(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """See :meth:`Reservations.hold`."""
        return self._reservations.hold(keys)

    def release(self, blocks: Iterable[int]) -> None:
        """Give references back, in prompt order."""
        self._give(self._reservations.release(blocks, self._clock()))

    # -- leases

    def lease(
        self, keys: Sequence[BlockKey], duration_s: float, *, allow_gaps: bool
    ) -> tuple[int, list[tuple[int, int]], RegionDescriptor | None]:
        """The lease and what it holds, see :meth:`Reservations.lease`, and the key to read that with, if anything."""
        lease_id, held = self._reservations.lease(keys, duration_s, self._clock(), allow_gaps)
        if not lease_id:
            return lease_id, held, None
        size = self.layout.block_bytes
        try:
            opened = self._keys.give(lease_id, [(block * size, size) for _, block in held], duration_s)
        except BaseException:
            self._over(lease_id)
            raise
        self._arm()
        return lease_id, held, opened

    def end_lease(self, lease_id: int) -> bool:
        """Whether it was still there. Its blocks may be used again when nobody reads them any more."""
        return self._keys.end(lease_id, lambda: self._over(lease_id))

    def _over(self, lease_id: int) -> None:
        self._give(self._reservations.end_lease(lease_id, self._clock()) or ())

    def _arm(self) -> None:
        """One timer for the next lease that ends. It may come for one that was released: that costs nothing."""
        deadline = self._reservations.next_deadline()
        if deadline is None or deadline >= self._lease_timer_s:
            return
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        delay_s = max(0.01, deadline - self._clock())
        self._lease_timer = asyncio.get_running_loop().call_later(delay_s, self._expire)
        self._lease_timer_s = deadline

    def _expire(self) -> None:
        self._lease_timer, self._lease_timer_s = None, math.inf
        for lease_id in self._reservations.overdue(self._clock()):
            self.end_lease(lease_id)
        self._arm()

    async def close(self) -> None:
        """Stop the timer; whoever waits is cancelled. Waits (bounded) for reads whose leases have ended."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
        for future in reversed(list(self._waiting.values())):
            self.withdraw(future)
        await self._keys.close()

    def check_integrity(self) -> None:
        """See :meth:`Reservations.check_integrity`."""
        self._reservations.check_integrity()
