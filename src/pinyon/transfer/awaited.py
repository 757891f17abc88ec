"""Small transfers that a task awaits: one request by the short way, on the event loop, which never waits for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence

from pinyon.transfer.chains.chain import UNDER_WAY, Outcome
from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.endpoints import EXPECTED, failure_of
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.small import SmallTransfers, Trip
from pinyon.transfer.submissions import Submissions
from pinyon.transfer.types.request import Reason, TransferRequest, TransferResult, TransferStatus

_GRACE_S = 1.0
"""A loop that is only busy notices within this time that a deadline has passed."""


def _nobody() -> None:
    """In place of a reference to a loop."""


class AwaitedTransfers:
    """What is asked for goes out at once, into a socket that is empty, and when the answer comes the loop takes it in:
    no thread takes part. Local memory is touched by the loop's thread alone."""

    def __init__(self, context: EngineContext, small: SmallTransfers, submissions: Submissions, peers: Peers) -> None:
        self._small = small
        self._submissions = submissions
        self._peers = peers
        self._limits = context.limits
        self._clock = context.clock
        self._under_way: dict[Trip, Callable[[], asyncio.AbstractEventLoop | None]] = {}
        """With whose they are, as weak references: a loop that is dropped shall go. Whoever takes one out, which is
        atomic, has its endpoint to himself, and puts it back or ends it."""

    def end_orphans(self, now: float) -> None:
        """End what nobody goes on with: its loop is gone, or does not run, so that it has missed the deadline. From any
        thread."""
        for trip in list(self._under_way):
            whose = self._under_way.get(trip)
            if whose is None:  # its loop is at it, or has ended it
                continue
            loop = whose()  # which lives on for as long as this takes
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

    async def transfer(self, requests: Sequence[TransferRequest], timeout_s: float | None) -> list[TransferResult]:
        """Move and wait; a task that is cancelled ends the transfer first. Raises InvalidTransfer,
        TransferLimitReached, EngineClosed."""
        trip = self._small.set_out(requests, timeout_s)
        results = None if trip is None else await self._move(trip)
        if results is not None:
            return results
        return await self._submissions.submit(requests, timeout_s).wait_async()

    async def _move(self, trip: Trip) -> list[TransferResult] | None:
        """On the loop. None: nothing was done, it has to go the long way."""
        small, endpoint = self._small, trip.endpoint
        outcome: Outcome | None = None
        again = False
        try:
            outcome = small.run(trip, waits=False)
            if outcome is UNDER_WAY:
                self._under_way[trip] = weakref.ref(asyncio.get_running_loop())
                outcome = await self._answer(trip)
                endpoint.link.stream.waits_itself()
        except EXPECTED as error:
            outcome, again = failure_of(error, endpoint)
        except GeneratorExit:  # perhaps by the collector, in the midst of anything: the books have locks, so they wait
            if self._under_way.pop(trip, None) is None:  # it was given up
                endpoint.close(hard=True)
            else:
                self._under_way[trip] = _nobody
            raise
        except BaseException as error:  # the task is cancelled, or a defect
            self._under_way.pop(trip, None)
            if isinstance(error, asyncio.CancelledError):
                small.give_up(trip, TransferStatus.CANCELLED, Reason.CANCELLED)
            else:
                small.give_up(trip, TransferStatus.FAILED, Reason.INTERNAL)
            raise
        self._under_way.pop(trip, None)
        end = small.conclude(trip, outcome, again, self._peers.submit)
        return await end.wait_async() if isinstance(end, TransferHandle) else end

    async def _answer(self, trip: Trip) -> Outcome:
        """How it ended, once the answer is here.

        Raises: what ``Endpoint.proceed`` raises, Stalled, DeadlineReached
        """
        loop, under_way = asyncio.get_running_loop(), self._under_way
        endpoint, deadline = trip.endpoint, trip.deadline
        ended: asyncio.Future[Outcome] = loop.create_future()
        clock, stall_s = self._clock, self._limits.stall_s
        moved_at = clock()
        timer: asyncio.TimerHandle | None = None

        def readable() -> None:
            nonlocal moved_at
            if ended.done():
                return
            whose = under_way.pop(trip, None)
            if whose is None:  # it was given up
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
            if not loop.is_closed():  # else the task is only being thrown away
                loop.remove_reader(descriptor)
