"""The worker's KV blocks: :class:`pinyon.paging.Reservations` and :class:`pinyon.decisions.Admission` with futures for
who waits and a timer for leases."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from pinyon.batching import BatchRequest
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.decisions import Admission, RoomWaits
from pinyon.eviction import NO_TRAITS, Traits, Use
from pinyon.paging import BlockPool, Reservation, Reservations
from pinyon.paging.second_tier import NO_SLOT
from pinyon.runtime.deadlines import Deadline
from pinyon.store.lease_keys import LeaseKeys
from pinyon.transfer import RegionDescriptor
from services.worker.kv.swaps import Swapping, Swaps


def _nobody(seconds: float, passed_over_s: float) -> None:
    """Nobody is told."""


class KvCache:
    """Owned by the event loop's thread."""

    def __init__(
        self,
        layout: KvLayout,
        pool: BlockPool,
        admission: Admission,
        reservations: Reservations,
        keys: LeaseKeys,
        clock: Clock,
        swaps: Swaps | None = None,
    ) -> None:
        """``keys``: by which peers read what they leased; ``swaps``: if there is a second tier."""
        self.layout = layout
        self._keys = keys
        self.swaps = swaps
        """To look at."""
        self.pool = pool
        """To look at: whatever changes it goes through the reservations."""
        self.admission = admission
        """To look at: whatever changes it goes through here."""
        self._reservations = reservations
        self.clock = clock
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Reservation], float]] = {}
        """By number, with since when."""
        self._room_waits = RoomWaits()
        self._lease_end = Deadline(asyncio.get_running_loop(), self._expire)
        self._asking_back = False
        self.spare: Callable[[], Iterator[None]] | None = None
        """Releases what is held only for later, piece by piece, as long as somebody wants room."""
        self.on_published: Callable[[Sequence[int]], None] | None = None
        """Called with blocks that have new content."""
        self.on_admitted: Callable[[float, float], None] = _nobody
        """Called with the seconds that a request has waited for its blocks, and for how many of them others went
        before it that came later."""

    # -- figures

    @property
    def leases(self) -> int:
        return self._reservations.leases

    def room_wait_s(self) -> float:
        """See :meth:`RoomWaits.wait_s`."""
        return self._room_waits.wait_s(self.clock())

    # -- reservations

    def number(self) -> int:
        """Of a request that comes now: the next one."""
        return next(self._numbers)

    def reserve(self, request: BatchRequest, *, at_once: bool = True) -> asyncio.Future[Reservation]:
        """See :meth:`Admission.enqueue`. The future is done at once if there is room and nobody waits; for one that
        gave way (not ``at_once``) not before :meth:`settle`.

        Whoever gets blocks calls :meth:`end` once, and whoever stops waiting :meth:`withdraw`.
        """
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self.admission.enqueue(request)
        self._waiting[request.number] = (future, self.clock())
        if at_once:
            self._room_waits.began(request.number, self.clock())
            self.settle()
        return future

    def withdraw(self, number: int, future: asyncio.Future[Reservation]) -> None:
        """The reservation is not wanted any more, whether it was granted meanwhile or not."""
        if future.cancel():
            del self._waiting[number]
            self._room_waits.left(number, self.clock())
            self.admission.withdraw(number)
            self.settle()  # it may have been the one that blocked the others
        elif not future.cancelled():
            self.end(number, future.result().table)

    def end(self, number: int, table: Iterable[int]) -> None:
        """An admitted request gives its blocks back, in prompt order; or some that it must not are not in ``table``."""
        self.give_way(number, table)
        self.settle()

    def give_way(self, number: int, table: Iterable[int]) -> None:
        """See :class:`pinyon.decisions.Room`. :meth:`settle` follows."""
        self.admission.end(number)
        self._reservations.release(table, self.clock())

    def grow(self, number: int, count: int) -> list[int] | None:
        """See :meth:`Admission.grow`. What is held only for later goes first."""
        blocks = self.admission.grow(number, count, self.clock())
        if blocks is None:
            self._ask_back(lambda: self.pool.free + self.pool.cached >= count)
            blocks = self.admission.grow(number, count, self.clock())
        self._swap()
        return blocks

    def switch(self, choice: str) -> None:
        """See :meth:`Admission.switch`."""
        self.admission.switch(choice, self.clock())
        self.settle()

    def settle(self) -> None:
        """What those that run have left goes to those that wait."""
        if self._waiting and not self._asking_back and not self._served():
            self._ask_back(self._served)

    def _served(self) -> bool:
        """Admit whoever has his turn; whether nobody waits any more."""
        now_s = self.clock()
        granted = self.admission.admit(now_s)
        self._swap()
        for number, reservation, passed_over_s in granted:
            future, since_s = self._waiting.pop(number)
            future.set_result(reservation)
            self.on_admitted(now_s - since_s, passed_over_s)
            self._room_waits.granted(number, now_s)
        return not self._waiting

    def _ask_back(self, enough: Callable[[], bool]) -> None:
        """Have what is held only for later released, until it is enough."""
        if self.spare is None or self._asking_back:
            return
        self._asking_back = True  # what it releases comes back to here
        try:
            for _ in self.spare():
                if enough():
                    break
        finally:
            self._asking_back = False

    def extend(self, reservation: Reservation, keys: Sequence[BlockKey], traits: Traits | None = None) -> None:
        """See :meth:`Reservations.extend`."""
        taken_over = self._reservations.extend(reservation, keys, self.clock(), traits)
        self._swap()
        if taken_over:
            self.settle()

    def publish(
        self,
        table: list[int],
        keys: Sequence[BlockKey],
        traits: Traits = NO_TRAITS,
        first: int = 0,
        after: BlockKey | None = None,
    ) -> list[int]:
        """The blocks of a table from ``first`` on, one per key, are complete: see :meth:`Reservations.publish`.

        Where others hold the same content, their blocks take the places in the table. Returns the duplicates: to be
        released when nobody reads them any more. Not to be called while a step has the table.
        """
        blocks = table[first : first + len(keys)]
        if self.on_published is not None:
            self.on_published(blocks)
        duplicates: list[int] = []
        for index, block in self._reservations.publish(blocks, keys, self.clock(), traits, first, after):
            duplicates.append(table[first + index])
            table[first + index] = block
        return duplicates

    def hold(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """See :meth:`Reservations.hold`."""
        return self._reservations.hold(keys, self.clock())

    def release(self, blocks: Iterable[int]) -> None:
        """Give references back, in prompt order."""
        self._reservations.release(blocks, self.clock())
        self.settle()

    # -- the second tier

    def _swap(self) -> None:
        """Begin the copies that handing out blocks made necessary."""
        if self.swaps is None or self.pool.below is None or not self.pool.below.pending:
            return
        swaps = self._reservations.take_swaps()
        self.swaps.submit(swaps)
        if self.on_published is not None:
            self.on_published([swap.block for swap in swaps if swap.into != NO_SLOT])

    def swapping(self, tables: Iterable[Sequence[int]]) -> Swapping | None:
        """See :meth:`Swaps.of`: copies to be waited for before the engine touches these blocks."""
        return None if self.swaps is None else self.swaps.of(tables)

    def ready(self, blocks: Sequence[int]) -> int:
        """See :meth:`Swaps.ready`."""
        return len(blocks) if self.swaps is None else self.swaps.ready(blocks)

    def settled(self, blocks: Sequence[int]) -> asyncio.Future[None]:
        """See :meth:`Swaps.settled`: to be awaited before anybody but the engine touches these blocks."""
        if self.swaps is not None:
            return self.swaps.settled(blocks)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    # -- leases

    def lease(
        self,
        keys: Sequence[BlockKey],
        duration_s: float,
        *,
        allow_gaps: bool,
        use: Use = Use(),  # noqa: B008  # a value
    ) -> tuple[int, list[tuple[int, int]], RegionDescriptor | None]:
        """The lease and what it holds, see :meth:`Reservations.lease`, and the key to read that with, if anything. Not
        to be read before it is :meth:`settled`."""
        lease_id, held = self._reservations.lease(keys, duration_s, self.clock(), allow_gaps, use)
        self._swap()
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
        if self._reservations.end_lease(lease_id, self.clock()):
            self.settle()

    def _arm(self) -> None:
        """For the next lease that ends. The time may come for one that was released: that costs nothing."""
        next_s = self._reservations.next_deadline()
        if next_s is not None:
            self._lease_end.set(asyncio.get_running_loop().time() + next_s - self.clock())

    def _expire(self) -> None:
        for lease_id in self._reservations.overdue(self.clock()):
            self.end_lease(lease_id)
        self._arm()

    async def close(self) -> None:
        """Stop the timer; whoever waits is cancelled. Waits (bounded) for reads whose leases have ended."""
        self._lease_end.close()
        for number in reversed(list(self._waiting)):
            self.withdraw(number, self._waiting[number][0])
        await self._keys.close()
        if self.swaps is not None:
            await self.swaps.close()
