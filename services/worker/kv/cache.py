"""The worker's KV blocks: :class:`pinyon.paging.Reservations` with futures for who waits and a timer for leases."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.eviction import NO_TRAITS, Traits
from pinyon.paging import BlockPool, Grant, Reservation, Reservations

__all__ = ["KvCache"]


class KvCache:
    """Owned by the event loop's thread."""

    def __init__(self, layout: KvLayout, pool: BlockPool, reservations: Reservations, clock: Clock) -> None:
        self.layout = layout
        self.pool = pool
        """To look at: whatever changes it goes through the reservations."""
        self._reservations = reservations
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reservation]] = {}
        self._number_of: dict[asyncio.Future[Reservation], int] = {}
        self._lease_timer: asyncio.TimerHandle | None = None
        self._asking_back = False
        self.on_shortage: Callable[[], None] | None = None
        """Called when somebody waits for room, here or after something was released: to release what is held only for
        later."""

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
        duplicates: list[int] = []
        for index, block in self._reservations.publish(table[first : first + len(keys)], keys, traits, first):
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
    ) -> tuple[int, list[tuple[int, int]]]:
        """See :meth:`Reservations.lease`."""
        leased = self._reservations.lease(keys, duration_s, self._clock(), allow_gaps)
        self._arm()
        return leased

    def end_lease(self, lease_id: int) -> bool:
        """Whether it was still there."""
        grants = self._reservations.end_lease(lease_id, self._clock())
        self._give(grants or ())
        return grants is not None

    def _arm(self) -> None:
        """One timer for the next lease that ends."""
        deadline = self._reservations.next_deadline()
        if deadline is None or self._lease_timer is not None:
            return
        delay_s = max(0.01, deadline - self._clock())
        self._lease_timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._lease_timer = None
        self._give(self._reservations.expire(self._clock()))
        self._arm()

    def close(self) -> None:
        """Stop the timer; whoever waits is cancelled."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
        for future in reversed(list(self._waiting.values())):
            self.withdraw(future)

    def check_integrity(self) -> None:
        """See :meth:`Reservations.check_integrity`."""
        self._reservations.check_integrity()
