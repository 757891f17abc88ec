"""Who holds KV blocks, and who reads them until when.

One place hands blocks out and takes them back. What is reserved for a request grows with it. Who gets blocks next is
decided elsewhere: see :class:`pinyon.decisions.Admission`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pinyon.core.block_keys import BlockKey
from pinyon.eviction.policy import NO_TRAITS, Traits, Use
from pinyon.paging.block_pool import BlockPool
from pinyon.paging.leases import LeaseTable
from pinyon.paging.second_tier import Swap


@dataclass(slots=True)
class Reservation:
    """Blocks in prompt order, one reference each. The first ``held`` of them have content; the rest are the owner's."""

    table: list[int]
    held: int


class Reservations:
    """Blocks of the pool are referenced by reservations, leases and :meth:`hold` alike; the pool counts."""

    def __init__(self, pool: BlockPool, leases: LeaseTable[int]) -> None:
        self._pool = pool
        self._leases = leases

    @property
    def leases(self) -> int:
        return self._leases.count

    # -- reservations

    def reserve(
        self,
        keys: Sequence[BlockKey],
        total: int,
        now_s: float,
        traits: Traits | None = None,
        *,
        computes: bool = False,
    ) -> Reservation | None:
        """``total`` blocks, of which the leading run of ``keys`` that is held here comes with content: the request with
        these ``traits`` uses it. None when there is no room.

        ``computes``: it will compute and publish the rest of the keys here, if nobody else has before. Blocks that
        others reserved so are the same for all of them, so that each is there once. Of those that have a block, one at
        a time may write to it: :class:`pinyon.batching.PromptQueue` has the others wait.
        """
        table = self._pool.acquire_run(keys[:total], now_s, Use(traits))
        held = len(table)
        if computes:
            table += self._pool.share(keys[held:total])
        shared = len(table)
        fresh = self._pool.allocate(total - shared, now_s=now_s)
        if fresh is None:
            self._pool.release(table, now_s=now_s)
            return None
        table += fresh
        if computes:
            self._pool.promise(keys[shared:total], table[shared : len(keys)])
        return Reservation(table, held)

    def grow(self, count: int, now_s: float) -> list[int] | None:
        """So many more blocks for one that runs; None when there is no room."""
        return self._pool.allocate(count, now_s=now_s)

    def extend(
        self, reservation: Reservation, keys: Sequence[BlockKey], now_s: float, traits: Traits | None = None
    ) -> int:
        """Take over blocks that became readable since: in ``reservation`` they replace its own empty ones.

        ``keys`` are those of the whole prompt's reusable blocks. Returns how many there were.
        """
        use = Use(traits, reservation.held)
        found = self._pool.acquire_run(keys[reservation.held : len(reservation.table)], now_s, use)
        end = reservation.held + len(found)
        replaced = reservation.table[reservation.held : end]
        reservation.table[reservation.held : end] = found
        reservation.held = end
        self._pool.release(replaced, now_s=now_s)
        return len(found)

    def publish(
        self,
        blocks: Sequence[int],
        keys: Sequence[BlockKey],
        now_s: float,
        traits: Traits = NO_TRAITS,
        first: int = 0,
        after: BlockKey | None = None,
    ) -> list[tuple[int, int]]:
        """The blocks' content is complete and correct: they may be reused and read by others from now on.

        ``traits`` are those of the request they were made for, ``first`` the place of the first one in its prompt and
        ``after`` the key before it, if there is one: what the eviction policy is told of them.

        Returns ``(index, block)`` where another block holds that content already: it has one reference more, for the
        caller, who uses it from now on and releases its own when nobody reads that any more.
        """
        held = self._pool.publish_all(blocks, keys, traits=traits, first=first, now_s=now_s, after=after)
        found = self._pool.acquire([keys[index] for index in held], now_s=now_s)
        return [(index, block) for index, (_, block) in zip(held, found, strict=True)]

    def hold(self, keys: Sequence[BlockKey], now_s: float) -> list[tuple[int, int]]:
        """``(index in keys, block)`` of every key that is in a block, with one reference each until :meth:`release`."""
        return self._pool.acquire(keys, allow_gaps=True, promote=False, now_s=now_s)

    def release(self, blocks: Iterable[int], now_s: float) -> None:
        """Give references back, in prompt order."""
        self._pool.release(blocks, now_s=now_s)

    # -- the second tier

    def take_swaps(self) -> list[Swap]:
        """See :meth:`SecondTier.take_swaps`: what reserving, growing, extending and leasing made necessary."""
        return [] if self._pool.below is None else self._pool.below.take_swaps()

    def swapped(self, out: int) -> None:
        """See :meth:`SecondTier.swapped`."""
        if self._pool.below is not None:
            self._pool.below.swapped(out)

    # -- leases

    def lease(
        self,
        keys: Sequence[BlockKey],
        duration_s: float,
        now_s: float,
        allow_gaps: bool,
        use: Use = Use(),  # noqa: B008  # a value
    ) -> tuple[int, list[tuple[int, int]]]:
        """``(lease id, [(index in keys, block)])``; the id is 0 when nothing is held.

        ``use``: of the request that reads them elsewhere.
        Raises :class:`pinyon.core.errors.ResourceExhausted` when there are too many leases.
        """
        found = self._pool.acquire(keys, allow_gaps=allow_gaps, now_s=now_s, use=use)
        if not found:
            return 0, []
        blocks = [block for _, block in found]
        try:
            return self._leases.grant(blocks, now_s, duration_s), found
        except BaseException:
            self._pool.release(blocks, now_s=now_s)
            raise

    def end_lease(self, lease_id: int, now_s: float) -> bool:
        """False if it had ended before."""
        blocks = self._leases.release(lease_id)
        if blocks is None:
            return False
        self._pool.release(blocks, now_s=now_s)
        return True

    def overdue(self, now_s: float) -> list[int]:
        """Leases whose time is up, each named once; the caller shuts their readers out and calls :meth:`end_lease`."""
        return self._leases.overdue(now_s)

    def next_deadline(self) -> float | None:
        """When :meth:`overdue` may name a lease, at the earliest; None when it will not."""
        return self._leases.next_deadline()
