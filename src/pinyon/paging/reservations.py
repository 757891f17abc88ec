"""Who gets KV blocks, in the order of arrival, and who reads them until when.

One place hands blocks out and takes them back. Those that wait are served in the order of their numbers, so nobody
overtakes a large request for ever; and a request whose blocks were taken from it again (:meth:`Reservations.preempt`)
comes before all that arrived later. Those that run are served first: what is theirs grows block by block
(:meth:`Reservations.grow`), and is not kept from them by whoever waits.

Whatever gives blocks back returns the grants that became possible by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from pinyon.core.block_keys import BlockKey
from pinyon.eviction.policy import NO_TRAITS, Traits
from pinyon.paging.block_pool import BlockPool
from pinyon.paging.leases import LeaseTable

__all__ = ["Grant", "Reservation", "Reservations"]


@dataclass(slots=True)
class Reservation:
    """Blocks in prompt order, one reference each. The first ``held`` of them have content; the rest are the owner's."""

    table: list[int]
    held: int


class Grant(NamedTuple):
    """What was asked for under ``number`` is the asker's from now on."""

    number: int
    reservation: Reservation


class Reservations:
    """Blocks of the pool are referenced by reservations, leases and :meth:`hold` alike; the pool counts."""

    def __init__(self, pool: BlockPool, leases: LeaseTable[int], headroom: int = 0) -> None:
        """``headroom``: blocks that are kept for :meth:`grow` while any are in use, so that those that enter do not
        stop those that run at once."""
        self._pool = pool
        self._leases = leases
        self._headroom = headroom
        self._waiting: dict[int, tuple[Sequence[BlockKey], int]] = {}
        self._order: list[int] = []
        """A heap of the numbers that wait, and of some that do not any more."""

    # -- figures

    @property
    def waiting(self) -> int:
        """Reservations that wait for room."""
        return len(self._waiting)

    @property
    def leases(self) -> int:
        return self._leases.count

    # -- reservations

    def reserve(self, number: int, keys: Sequence[BlockKey], total: int, now_s: float) -> list[Grant]:
        """``total`` blocks, of which the leading run of ``keys`` that is held here comes with content.

        Granted at once if there is room and nobody with a smaller number waits. Whoever stops waiting calls
        :meth:`withdraw`. Raises ``ValueError`` if the number waits already, or if the pool can never have so many.
        """
        if number in self._waiting:
            raise ValueError(f"reservation {number} waits already")
        if total > self._pool.total:
            raise ValueError(f"{total} blocks are more than the pool's {self._pool.total}")
        self._waiting[number] = (keys, total)
        heappush(self._order, number)
        return self._serve(now_s)

    def withdraw(self, number: int, now_s: float) -> list[Grant]:
        """It is not waited for any more. Raises ``KeyError`` if it does not wait."""
        del self._waiting[number]
        return self._serve(now_s)  # it may have been the one that blocked the others

    def _serve(self, now_s: float) -> list[Grant]:
        grants: list[Grant] = []
        while (number := self._first()) is not None:
            keys, total = self._waiting[number]
            reused = keys[:total]
            # Asked at every release for the one in front: it must cost little while there is no room.
            if not self._pool.has_room(reused, total + (self._headroom if self._pool.used else 0)):
                break
            held = [block for _, block in self._pool.acquire(reused)]
            fresh = self._pool.allocate(total - len(held), now_s=now_s)
            if fresh is None:
                raise RuntimeError("the pool has less room than it said")
            del self._waiting[number]
            grants.append(Grant(number, Reservation(held + fresh, len(held))))
        return grants

    def _first(self) -> int | None:
        """Who is next."""
        order, waiting = self._order, self._waiting
        while order and order[0] not in waiting:
            heappop(order)
        if len(order) > 2 * len(waiting) + 64:
            self._order = order = list(waiting)
            heapify(order)
        return order[0] if order else None

    def grow(self, count: int, now_s: float) -> list[int] | None:
        """So many more blocks for one that runs; None when there is no room, whoever waits for it."""
        return self._pool.allocate(count, now_s=now_s)

    def preempt(self, blocks: Iterable[int], now_s: float) -> None:
        """Give references back for others that run: nobody who waits is served by it before :meth:`settle`."""
        self._pool.release(blocks, now_s=now_s)

    def settle(self, now_s: float) -> list[Grant]:
        """What those that run have left goes to those that wait."""
        return self._serve(now_s)

    def extend(self, reservation: Reservation, keys: Sequence[BlockKey], now_s: float) -> list[Grant]:
        """Take over blocks that became readable since: in ``reservation`` they replace its own empty ones.

        ``keys`` are those of the whole prompt's reusable blocks.
        """
        found = self._pool.acquire(keys[reservation.held : len(reservation.table)])
        if not found:
            return []
        end = reservation.held + len(found)
        replaced = reservation.table[reservation.held : end]
        reservation.table[reservation.held : end] = [block for _, block in found]
        reservation.held = end
        return self.release(replaced, now_s)

    def publish(
        self, blocks: Sequence[int], keys: Sequence[BlockKey], traits: Traits = NO_TRAITS, first: int = 0
    ) -> list[tuple[int, int]]:
        """The blocks' content is complete and correct: they may be reused and read by others from now on.

        ``traits`` are those of the request they were made for, ``first`` the place of the first one in its prompt: what
        the eviction policy is told of them.

        Returns ``(index, block)`` where another block holds that content already: it has one reference more, for the
        caller, who uses it from now on and releases its own when nobody reads that any more.
        """
        held = self._pool.publish_all(blocks, keys, traits=traits, first=first)
        found = self._pool.acquire([keys[index] for index in held])
        return [(index, block) for index, (_, block) in zip(held, found, strict=True)]

    def hold(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """``(index in keys, block)`` of every key that is held, with one reference each until :meth:`release`."""
        return self._pool.acquire(keys, allow_gaps=True)

    def release(self, blocks: Iterable[int], now_s: float) -> list[Grant]:
        """Give references back, in prompt order."""
        self._pool.release(blocks, now_s=now_s)
        return self._serve(now_s)

    # -- leases

    def lease(
        self, keys: Sequence[BlockKey], duration_s: float, now_s: float, allow_gaps: bool
    ) -> tuple[int, list[tuple[int, int]]]:
        """``(lease id, [(index in keys, block)])``; the id is 0 when nothing is held.

        Raises :class:`pinyon.core.errors.ResourceExhausted` when there are too many leases.
        """
        found = self._pool.acquire(keys, allow_gaps=allow_gaps)
        if not found:
            return 0, []
        blocks = [block for _, block in found]
        try:
            return self._leases.grant(blocks, now_s, duration_s), found
        except BaseException:
            self._pool.release(blocks, now_s=now_s)
            raise

    def end_lease(self, lease_id: int, now_s: float) -> list[Grant] | None:
        """None if it had ended before."""
        blocks = self._leases.release(lease_id)
        return None if blocks is None else self.release(blocks, now_s)

    def overdue(self, now_s: float) -> list[int]:
        """Leases whose time is up, each named once; the caller shuts their readers out and calls :meth:`end_lease`."""
        return self._leases.overdue(now_s)

    def next_deadline(self) -> float | None:
        """When :meth:`overdue` may name a lease, at the earliest; None when it will not."""
        return self._leases.next_deadline()

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` if the books do not balance. O(blocks): for idle moments and tests."""
        self._pool.check_integrity()
        number = self._first()
        if number is not None:
            headroom = self._headroom if self._pool.used else 0
            if self._waiting[number][1] + headroom <= self._pool.free + self._pool.cached:
                raise RuntimeError("reservations: somebody waits for blocks that are there")
        if not self._waiting.keys() <= set(self._order):
            raise RuntimeError("reservations: somebody waits who is never next")
