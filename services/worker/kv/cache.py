"""The worker's KV blocks.

:class:`pinyon.paging.Reservations` and :class:`pinyon.decisions.Admission`, with futures for waiting requests and a
timer for leases."""

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


class KvCache:
    """The KV blocks, owned by the event loop's thread.

    Peers read leased blocks by ``keys`` of the transfer engine; ``swaps`` is for a second tier, if any."""

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
        self.layout = layout
        self._keys = keys
        self.swaps = swaps
        """The copies of the second tier, for reading."""
        self.pool = pool
        """The pool, for reading: changes go through the reservations."""
        self.admission = admission
        """The admission, for reading: changes go through this object."""
        self._reservations = reservations
        self.clock = clock
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Reservation], float]] = {}
        """The waiting requests by number, with the times since when."""
        self._room_waits = RoomWaits()
        self._lease_end = Deadline(asyncio.get_running_loop(), self._expire)
        self._asking_back = False
        self.spare: Callable[[], Iterator[None]] | None = None
        """Releases blocks held only for later, piece by piece, as long as a request wants room."""
        self.on_published: Callable[[Sequence[int]], None] | None = None
        """The callback for blocks that have new content."""
        self.on_admitted: Callable[[float, float], None] = lambda seconds, passed_over_s: None
        """The callback for an admitted request: the seconds that it waited for its blocks.

        The second argument is how many of these seconds requests that came later were served before it."""

    # -- figures

    @property
    def leases(self) -> int:
        return self._reservations.leases

    def room_wait_s(self) -> float:
        """Returns the expected wait, see :meth:`RoomWaits.wait_s`."""
        return self._room_waits.wait_s(self.clock())

    # -- reservations

    def number(self) -> int:
        """Returns the number of a new request: the next one."""
        return next(self._numbers)

    def reserve(self, request: BatchRequest, *, at_once: bool = True) -> asyncio.Future[Reservation]:
        """Asks for a request's blocks, see :meth:`Admission.enqueue`.

        The future is done at once if there is room and no request waits. For a request that gave way (not ``at_once``)
        it is not done before :meth:`settle`. A request that gets blocks calls :meth:`end` once; one that stops waiting
        :meth:`withdraw`."""
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self.admission.enqueue(request)
        self._waiting[request.number] = (future, self.clock())
        if at_once:
            self._room_waits.began(request.number, self.clock())
            self.settle()
        return future

    def withdraw(self, number: int, future: asyncio.Future[Reservation]) -> None:
        """Gives up a reservation, whether it was granted meanwhile or not."""
        if future.cancel():
            del self._waiting[number]
            self._room_waits.left(number, self.clock())
            self.admission.withdraw(number)
            self.settle()  # it may have blocked the others
        elif not future.cancelled():
            self.end(number, future.result().table)

    def end(self, number: int, table: Iterable[int]) -> None:
        """Ends an admitted request and releases ``table``, in prompt order. Blocks left out of it stay held."""
        self.give_way(number, table)
        self.settle()

    def give_way(self, number: int, table: Iterable[int]) -> None:
        """Releases a request's blocks, see :class:`pinyon.decisions.Room`. :meth:`settle` follows."""
        self.admission.end(number)
        self._reservations.release(table, self.clock())

    def grow(self, number: int, count: int) -> list[int] | None:
        """Grows a request, see :meth:`Admission.grow`. Blocks held only for later are released first."""
        blocks = self.admission.grow(number, count, self.clock())
        if blocks is None:
            self._ask_back(lambda: self.pool.free + self.pool.cached >= count)
            blocks = self.admission.grow(number, count, self.clock())
        self._swap()
        return blocks

    def switch(self, choice: str) -> None:
        """Switches the policy, see :meth:`Admission.switch`."""
        self.admission.switch(choice, self.clock())
        self.settle()

    def settle(self) -> None:
        """Gives the room that running requests leave to waiting ones."""
        if self._waiting and not self._asking_back and not self._served():
            self._ask_back(self._served)

    def _served(self) -> bool:
        """Admits the requests whose turn it is. Returns whether none waits any more."""
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
        """Has blocks held only for later released, until it is enough."""
        if self.spare is None or self._asking_back:
            return
        self._asking_back = True  # its releases come back to here
        try:
            for _ in self.spare():
                if enough():
                    break
        finally:
            self._asking_back = False

    def extend(self, reservation: Reservation, keys: Sequence[BlockKey], traits: Traits | None = None) -> None:
        """Takes over readable blocks, see :meth:`Reservations.extend`."""
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
        """Publishes the complete blocks of a table from ``first`` on, one per key, see :meth:`Reservations.publish`.

        Where others hold the same content, their blocks take the places in the table. Returns the duplicates, to be
        released when nothing reads them any more. Must not be called while a step has the table."""
        blocks = table[first : first + len(keys)]
        if self.on_published is not None:
            self.on_published(blocks)
        duplicates: list[int] = []
        for index, block in self._reservations.publish(blocks, keys, self.clock(), traits, first, after):
            duplicates.append(table[first + index])
            table[first + index] = block
        return duplicates

    def hold(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Holds the blocks of these keys, see :meth:`Reservations.hold`."""
        return self._reservations.hold(keys, self.clock())

    def release(self, blocks: Iterable[int]) -> None:
        """Gives references back, in prompt order."""
        self._reservations.release(blocks, self.clock())
        self.settle()

    # -- the second tier

    def _swap(self) -> None:
        """Begins the copies that handing out blocks made necessary."""
        if self.swaps is None or self.pool.below is None or not self.pool.below.pending:
            return
        swaps = self._reservations.take_swaps()
        self.swaps.submit(swaps)
        if self.on_published is not None:
            self.on_published([swap.block for swap in swaps if swap.into != NO_SLOT])

    def swapping(self, tables: Iterable[Sequence[int]]) -> Swapping | None:
        """Returns the copies to wait for before the engine touches these blocks, see :meth:`Swaps.of`."""
        return None if self.swaps is None else self.swaps.of(tables)

    def ready(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks have their content, see :meth:`Swaps.ready`."""
        return len(blocks) if self.swaps is None else self.swaps.ready(blocks)

    def settled(self, blocks: Sequence[int]) -> asyncio.Future[None]:
        """Returns what others than the engine await before they touch these blocks, see :meth:`Swaps.settled`."""
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
        """Returns the lease and its blocks, see :meth:`Reservations.lease`, and the key to read them with, if any.

        They must not be read before they are :meth:`settled`."""
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

    def renew_lease(self, lease_id: int, lease_s: float) -> bool:
        """Moves the end of a lease to ``lease_s`` seconds from now. Returns False if it is over."""
        if not self._keys.renew(lease_id, lease_s):
            return False
        renewed = self._reservations.renew_lease(lease_id, self.clock(), lease_s)
        self._arm()
        return renewed

    def end_lease(self, lease_id: int) -> bool:
        """Ends a lease; returns whether it was there. Its blocks may be used again when nothing reads them any more."""
        return self._keys.end(lease_id, lambda: self._over(lease_id))

    def _over(self, lease_id: int) -> None:
        if self._reservations.end_lease(lease_id, self.clock()):
            self.settle()

    def _arm(self) -> None:
        """Sets the timer for the next lease to end. That lease may be released before, which costs nothing."""
        next_s = self._reservations.next_deadline()
        if next_s is not None:
            self._lease_end.set(asyncio.get_running_loop().time() + next_s - self.clock())

    def _expire(self) -> None:
        for lease_id in self._reservations.overdue(self.clock()):
            self.end_lease(lease_id)
        self._arm()

    async def close(self) -> None:
        """Stops the timer, cancels waiting requests, and waits (bounded) for reads whose leases have ended."""
        self._lease_end.close()
        for number in reversed(list(self._waiting)):
            self.withdraw(number, self._waiting[number][0])
        await self._keys.close()
        if self.swaps is not None:
            await self.swaps.close()
