"""Small transfers that a task awaits: one request by the short way, on the event loop, which never waits for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence

from pinyon.transfer.chains.chain import UNDER_WAY, ChainOutcome
from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.endpoint import EXPECTED, failure_of
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.small import SmallTransfers, Trip
from pinyon.transfer.submissions import Submissions
from pinyon.transfer.types.request import Reason, TransferRequest, TransferResult, TransferStatus

_GRACE_S = 1.0
"""An event loop that is busy but not stuck notices within this time that a deadline has passed."""


def _nobody() -> None:
    """Stands for a weak reference to a loop that is gone."""


class AwaitedTransfers:
    """Transfers of one small request each by the event loop's thread; no other thread touches the local memory.

    The request goes out at once into an empty socket, and the loop takes the answer in when it comes."""

    def __init__(self, context: EngineContext, small: SmallTransfers, submissions: Submissions, peers: Peers) -> None:
        self._small = small
        self._submissions = submissions
        self._peers = peers
        self._limits = context.limits
        self._clock = context.clock
        self._under_way: dict[Trip, Callable[[], asyncio.AbstractEventLoop | None]] = {}
        """Trips that wait for an answer, with weak references to their loops, so that a dropped loop can be collected.

        Taking a trip out is atomic and gives its endpoint to the taker, who puts the trip back or ends it."""

    def end_orphans(self, now: float) -> None:
        """Ends trips that nothing continues: their loop is gone, or is stuck beyond the deadline. From any thread."""
        for trip in list(self._under_way):
            whose = self._under_way.get(trip)
            if whose is None:  # its loop is working on it, or has ended it
                continue
            loop = whose()  # a strong reference: the loop lives on for as long as this takes
            gone = loop is None or loop.is_closed()
            if not gone and now < trip.deadline + _GRACE_S:
                continue
            if self._under_way.pop(trip, None) is None or self._peers.moving.pop(trip.endpoint, None) is None:
                continue
            if gone:
                trip.way.endpoints.discard(trip.endpoint)
                self._small.ended(trip, TransferStatus.CANCELLED, Reason.CANCELLED)
            else:
                trip.way.endpoints.disown(trip.endpoint)
                self._small.ended(trip, TransferStatus.TIMEOUT, Reason.DEADLINE)

    async def transfer(
        self, requests: Sequence[TransferRequest], timeout_s: float | None, *, checksum: bool
    ) -> list[TransferResult]:
        """Moves requests and waits; a task that is cancelled ends the transfer first.

        Raises InvalidTransfer, TransferLimitReached or EngineClosed."""
        trip = self._small.set_out(requests, timeout_s)
        end = None if trip is None else await self._move(trip)
        if end is None:
            end = self._submissions.submit(requests, timeout_s, checksum=checksum)
        return await end.wait_async() if isinstance(end, TransferHandle) else end

    async def _move(self, trip: Trip) -> TransferHandle | list[TransferResult] | None:
        """Moves a trip on its loop; returns what ``SmallTransfers.conclude`` does."""
        small, endpoint = self._small, trip.endpoint
        outcome: ChainOutcome | None = None
        again = False
        try:
            outcome = small.run(trip, waits=False)
            if outcome is UNDER_WAY:
                self._under_way[trip] = weakref.ref(asyncio.get_running_loop())
                outcome = await self._answer(trip)
                endpoint.link.stream.waits_itself()
        except EXPECTED as error:
            outcome, again = failure_of(error, endpoint)
        except GeneratorExit:  # perhaps by the collector, while a lock is held: the books, which need locks, must wait
            if self._under_way.pop(trip, None) is None:  # ``end_orphans`` gave it up
                endpoint.close(hard=True)
            else:
                self._under_way[trip] = _nobody
            raise
        except BaseException as error:  # the task is cancelled, or there is a defect
            self._under_way.pop(trip, None)
            if isinstance(error, asyncio.CancelledError):
                small.give_up(trip, TransferStatus.CANCELLED, Reason.CANCELLED)
            else:
                small.give_up(trip, TransferStatus.FAILED, Reason.INTERNAL)
            raise
        self._under_way.pop(trip, None)
        return small.conclude(trip, outcome, again, self._peers.submit)

    async def _answer(self, trip: Trip) -> ChainOutcome:
        """Waits for the answer; returns the outcome. Raises Stalled, DeadlineReached, and like ``Endpoint.proceed``."""
        loop, under_way = asyncio.get_running_loop(), self._under_way
        endpoint, deadline = trip.endpoint, trip.deadline
        ended: asyncio.Future[ChainOutcome] = loop.create_future()
        clock, stall_s = self._clock, self._limits.stall_s
        moved_at = clock()
        timer: asyncio.TimerHandle | None = None

        def readable() -> None:
            nonlocal moved_at
            if ended.done():
                return
            whose = under_way.pop(trip, None)
            if whose is None:  # ``end_orphans`` gave it up
                ended.set_exception(DeadlineReached())
                return
            try:
                outcome = endpoint.proceed()
            except Exception as error:
                ended.set_exception(error)
                return
            finally:
                under_way[trip] = whose
            moved_at = clock()
            if outcome is not None:
                ended.set_result(outcome)

        def look() -> None:
            nonlocal timer
            if ended.done():
                return
            now = clock()
            if now >= deadline:
                ended.set_exception(DeadlineReached())
            elif now >= moved_at + stall_s:
                ended.set_exception(Stalled())
            else:
                timer = loop.call_later(min(deadline, moved_at + stall_s) - now, look)

        descriptor = endpoint.link.stream.sock.fileno()
        timer = loop.call_later(min(deadline - moved_at, stall_s), look)
        loop.add_reader(descriptor, readable)
        try:
            return await ended
        finally:
            timer.cancel()
            if not loop.is_closed():  # a closed loop only throws the task away
                loop.remove_reader(descriptor)
