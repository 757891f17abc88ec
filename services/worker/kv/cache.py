"""The worker's KV blocks: who holds which, who waits for some, who reads them over the network.

One place hands blocks out and takes them back, in the order of asking (FCFS), so nobody overtakes a large request for
ever. Blocks are referenced by requests, leases and background puts alike; the pool counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable

__all__ = ["KvCache", "Reservation"]


@dataclass(slots=True)
class Reservation:
    """Blocks in prompt order, one reference each. The first ``held`` of them have content; the rest are the owner's."""

    table: list[int]
    held: int


@dataclass(slots=True)
class _Waiter:
    keys: Sequence[BlockKey]
    total: int
    future: asyncio.Future[Reservation]


class _CountingLru(Lru[int]):
    """LRU that counts what it gave up."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted = 0

    def victim(self, now_s: float = 0.0) -> int | None:
        victim = super().victim(now_s)
        self.evicted += victim is not None
        return victim


class KvCache:
    """Owned by the event loop's thread."""

    def __init__(self, layout: KvLayout, num_blocks: int, clock: Clock, *, first_lease_id: int = 1) -> None:
        self.layout = layout
        self._eviction = _CountingLru()
        self.pool = BlockPool(num_blocks, self._eviction)
        self._leases: LeaseTable[int] = LeaseTable(first_id=first_lease_id)
        self._clock = clock
        self._waiters: deque[_Waiter] = deque()
        self._lease_timer: asyncio.TimerHandle | None = None

    # -- figures

    @property
    def waiting(self) -> int:
        """Reservations that wait for room."""
        return sum(not waiter.future.done() for waiter in list(self._waiters))

    @property
    def leases(self) -> int:
        return self._leases.count

    @property
    def evicted(self) -> int:
        """Blocks evicted since the start."""
        return self._eviction.evicted

    # -- reservations

    def reserve(self, keys: Sequence[BlockKey], total: int) -> asyncio.Future[Reservation]:
        """``total`` blocks, of which the leading run of ``keys`` that is held here comes with content.

        The future is done at once if there is room and nobody waits. Whoever stops waiting calls :meth:`withdraw`.
        """
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(keys, total, future))
        self._serve_waiters()
        return future

    def withdraw(self, future: asyncio.Future[Reservation]) -> None:
        """The reservation is not wanted any more, whether it was granted meanwhile or not."""
        if future.cancel():
            self._serve_waiters()  # it may have been the one that blocked the others
        elif not future.cancelled():
            self.release(future.result().table)

    def _serve_waiters(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():
                reservation = self._try(waiter.keys, waiter.total)
                if reservation is None:
                    return
                waiter.future.set_result(reservation)
            self._waiters.popleft()

    def _try(self, keys: Sequence[BlockKey], total: int) -> Reservation | None:
        held = [block for _, block in self.pool.acquire(keys[:total])]
        fresh = self.pool.allocate(total - len(held), now_s=self._clock())
        if fresh is None:
            self.pool.release(held, now_s=self._clock())
            return None
        return Reservation(held + fresh, len(held))

    def extend(self, reservation: Reservation, keys: Sequence[BlockKey]) -> None:
        """Take over blocks that became readable since: they replace the reservation's own empty ones.

        ``keys`` are those of the whole prompt's reusable blocks.
        """
        found = self.pool.acquire(keys[reservation.held : len(reservation.table)])
        if not found:
            return
        end = reservation.held + len(found)
        replaced = reservation.table[reservation.held : end]
        reservation.table[reservation.held : end] = [block for _, block in found]
        reservation.held = end
        self.release(replaced)

    def publish(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """The blocks' content is complete and correct: they may be reused and read by others from now on."""
        for block, key in zip(blocks, keys, strict=True):
            self.pool.publish(block, key)

    def release(self, blocks: Iterable[int]) -> None:
        """Give references back, in prompt order."""
        self.pool.release(blocks, now_s=self._clock())
        if self._waiters:
            self._serve_waiters()

    # -- leases

    def lease(
        self, keys: Sequence[BlockKey], duration_s: float, *, allow_gaps: bool
    ) -> tuple[int, list[tuple[int, int]]]:
        """``(lease id, [(index in keys, block)])``; the id is 0 when nothing is held.

        Raises :class:`pinyon.core.errors.ResourceExhausted` when there are too many leases.
        """
        found = self.pool.acquire(keys, allow_gaps=allow_gaps)
        if not found:
            return 0, []
        blocks = [block for _, block in found]
        try:
            lease_id = self._leases.grant(blocks, self._clock(), duration_s)
        except BaseException:
            self.release(blocks)
            raise
        self._arm()
        return lease_id, found

    def end_lease(self, lease_id: int) -> bool:
        """Whether it was still there."""
        blocks = self._leases.release(lease_id)
        if blocks is None:
            return False
        self.release(blocks)
        return True

    def _arm(self) -> None:
        """One timer for the next lease that ends."""
        deadline = self._leases.next_deadline()
        if deadline is None or self._lease_timer is not None:
            return
        delay_s = max(0.01, deadline - self._clock())
        self._lease_timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._lease_timer = None
        for blocks in self._leases.expire(self._clock()):
            self.release(blocks)
        self._arm()

    def close(self) -> None:
        """Stop the timer; waiters are cancelled."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
        for waiter in self._waiters:
            waiter.future.cancel()
        self._waiters.clear()
