"""Reservations and leases: who holds KV blocks, who reads them, and until when.

This is the only place that hands blocks out and takes them back. A request's reservation grows with it. Which request
gets blocks next is decided elsewhere: see :class:`pinyon.decisions.Admission`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pinyon.core.block_keys import BlockKey
from pinyon.eviction.interface import NO_TRAITS, Traits, Use
from pinyon.paging.block_pool import BlockPool
from pinyon.paging.leases import LeaseTable
from pinyon.paging.second_tier import Swap


@dataclass(slots=True)
class Reservation:
    """Blocks in prompt order, one reference each. The first ``held`` have content; the owner fills the rest."""

    table: list[int]
    held: int


class Reservations:
    """The holders of a pool's blocks: reservations, leases and :meth:`hold` take references that the pool counts."""

    def __init__(self, pool: BlockPool, leases: LeaseTable[int]) -> None:
        self._pool = pool
        self._leases = leases

    @property
    def leases(self) -> int:
        return len(self._leases)

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
        """Returns ``total`` blocks, the first of which come with content; None when there is no room.

        These first blocks are the leading run of ``keys`` that is held here; the request with these ``traits`` uses it.
        With ``computes``, the request will compute and publish the rest of the keys, unless another request did so
        before. Requests that reserve the same keys with ``computes`` share the blocks, so that each key is computed
        once. Only one holder of such a block may write to it at a time: :class:`pinyon.batching.PromptQueue` has the
        others wait."""
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
        """Returns ``count`` more blocks for a running request; None when there is no room."""
        return self._pool.allocate(count, now_s=now_s)

    def extend(
        self, reservation: Reservation, keys: Sequence[BlockKey], now_s: float, traits: Traits | None = None
    ) -> int:
        """Replaces the reservation's empty blocks by readable ones of reusable ``keys``; returns how many."""
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
        """Publishes blocks whose content is complete and correct: from now on others may read and reuse them.

        The eviction policy is told the request's ``traits``, the place of the first block in its prompt (``first``) and
        the key before that (``after``; None: there is none). Returns ``(index, block)`` where another block holds that
        content already. This other block has one more reference, for the caller. The caller uses it from now on, and
        releases its own block when nobody reads that any more."""
        held = self._pool.publish_all(blocks, keys, traits=traits, first=first, now_s=now_s, after=after)
        found = self._pool.acquire([keys[index] for index in held], now_s=now_s)
        return [(index, block) for index, (_, block) in zip(held, found, strict=True)]

    def hold(self, keys: Sequence[BlockKey], now_s: float) -> list[tuple[int, int]]:
        """Returns ``(index in keys, block)`` of each key that is in a block, with one reference each until
        :meth:`release`."""
        return self._pool.acquire(keys, allow_gaps=True, promote=False, now_s=now_s)

    def release(self, blocks: Iterable[int], now_s: float) -> None:
        """Gives references back; the blocks are in prompt order."""
        self._pool.release(blocks, now_s=now_s)

    # -- the second tier

    def take_swaps(self) -> list[Swap]:
        """Returns the copies that reserving, growing, extending and leasing made necessary; see
        :meth:`SecondTier.take_swaps`."""
        return [] if self._pool.below is None else self._pool.below.take_swaps()

    def swapped(self, out: int) -> None:
        """Reports that ``out`` copies out of blocks have finished; see :meth:`SecondTier.swapped`."""
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
        """Grants a lease on the held blocks of ``keys`` and returns ``(lease id, [(index in keys, block)])``.

        The id is 0 when nothing is held. The reader elsewhere is the request that ``use`` describes. Raises
        :class:`pinyon.core.errors.ResourceExhausted` when there are too many leases."""
        found = self._pool.acquire(keys, allow_gaps=allow_gaps, now_s=now_s, use=use)
        if not found:
            return 0, []
        blocks = [block for _, block in found]
        try:
            return self._leases.grant(blocks, now_s, duration_s), found
        except BaseException:
            self._pool.release(blocks, now_s=now_s)
            raise

    def renew_lease(self, lease_id: int, now_s: float, lease_s: float) -> bool:
        """Moves the end of a lease to ``lease_s`` seconds from now. Returns False if it is over."""
        return self._leases.renew(lease_id, now_s, lease_s)

    def end_lease(self, lease_id: int, now_s: float) -> bool:
        """Ends a lease and releases its blocks; returns False if it had ended before."""
        blocks = self._leases.release(lease_id)
        if blocks is None:
            return False
        self._pool.release(blocks, now_s=now_s)
        return True

    def overdue(self, now_s: float) -> list[int]:
        """Returns the leases whose time is up, each once. The caller ends their readers' access, and then calls
        :meth:`end_lease`."""
        return self._leases.overdue(now_s)

    def next_deadline(self) -> float | None:
        """Returns the earliest time at which :meth:`overdue` may name a lease; None when it will name none."""
        return self._leases.next_deadline()
