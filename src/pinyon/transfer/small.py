"""Small transfers, moved by their callers: one request over an endpoint that is ready, without a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.transfer.chains.chain import DONE, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.endpoint import EXPECTED, Endpoint, failure_of
from pinyon.transfer.links.endpoints import ShortWay
from pinyon.transfer.memory.region import Region
from pinyon.transfer.memory.table import SMALL_BYTES
from pinyon.transfer.paths.peer import Peer
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.submissions import Submissions
from pinyon.transfer.types.errors import EngineClosed, InvalidTransfer, TransferLimitReached
from pinyon.transfer.types.request import Opcode, Reason, TransferRequest, TransferResult, TransferStatus
from pinyon.transfer.types.segment import KEY_BYTES, SegmentDescriptor


class Trip:
    """One request on the short way, with an endpoint of its own."""

    __slots__ = ("deadline", "endpoint", "peer", "region", "request", "started", "way")

    def __init__(
        self,
        request: TransferRequest,
        region: Region,
        peer: Peer,
        way: ShortWay,
        endpoint: Endpoint,
        started: float,
        deadline: float,
    ) -> None:
        self.request = request
        self.region = region
        self.peer = peer
        self.way = way
        self.endpoint = endpoint
        """An endpoint of ``way.endpoints``, given back or discarded when the trip is over."""
        self.started = started
        self.deadline = deadline


class SmallTransfers:
    """The short way: :meth:`set_out`, :meth:`run`, :meth:`conclude`. Thread-safe.

    Here a caller waits for the answer in its thread; in :mod:`.awaited` a task waits on its event loop."""

    def __init__(self, context: EngineContext, submissions: Submissions, peers: Peers) -> None:
        self._memory = context.memory
        self._submissions = submissions
        self._peers = peers
        limits = self._limits = context.limits
        self._meter = context.meter
        self._clock = context.clock
        self._most_bytes = min(limits.stripe_min_bytes, limits.max_frame_bytes)
        """The largest request; a larger one may be more than one chain."""

    def transfer(self, requests: Sequence[TransferRequest], timeout_s: float | None) -> list[TransferResult]:
        """Moves requests and waits until all have ended; raises InvalidTransfer, TransferLimitReached, EngineClosed."""
        trip = self.set_out(requests, timeout_s, self._most_bytes)
        end = None if trip is None else self._move(trip)
        if end is None:
            # The last chain runs in this thread: a hand-over would be most of a small transfer's time.
            end = self._submissions.submit(requests, timeout_s, last=self._peers.run)
        if not isinstance(end, TransferHandle):
            return end
        try:
            return end.wait()
        except BaseException:
            end.abandon()
            raise

    def set_out(
        self, requests: Sequence[TransferRequest], timeout_s: float | None, most_bytes: int = SMALL_BYTES
    ) -> Trip | None:
        """Checks a single request and takes a ready endpoint. Every call here adds to the latency.

        Returns None if nothing was done: the request must go the long way, which also reports any error in it."""
        if len(requests) != 1 or (timeout_s is not None and not timeout_s > 0):
            return None
        request = requests[0]
        opcode, local, local_offset, remote, key, remote_offset, length = request
        region = self._memory.get(local)
        if (
            region is None
            or not 0 < length <= most_bytes
            or local_offset < 0
            or local_offset + length > region.length
            or not 0 <= remote_offset < 1 << 62
            or type(opcode) is not Opcode
            or type(key) is not bytes
            or len(key) != KEY_BYTES
            or type(remote) is not SegmentDescriptor
            or region.device is not None
            or self._submissions.full
        ):
            return None
        peer = self._peers.by_name.get(remote.peer)
        if peer is None:
            return None
        published = remote.region(key)
        there = published.location if published is not None else ""
        way = peer.short_way(remote, region.location, there)
        if way is None or length > way.endpoints.moves_bytes:
            return None
        endpoint: Endpoint | None = way.endpoints.lend(way.key)
        if endpoint is None:
            return None
        peer.last_used = started = self._clock()
        if timeout_s is None:
            timeout_s = self._limits.budget_s(length + self._submissions.queued_bytes)
        self._peers.moving[endpoint] = way.path
        return Trip(request, region, peer, way, endpoint, started, started + timeout_s)

    def run(self, trip: Trip, *, waits: bool) -> ChainOutcome | None:
        """Runs ``Endpoint.move``, or ``begin`` if not ``waits``. Also returns None if the way was shut."""
        if not self._submissions.running or not trip.way.open:
            return None
        opcode, _, local_offset, _, key, remote_offset, length = trip.request
        act = trip.endpoint.move if waits else trip.endpoint.begin
        return act(opcode, trip.region, local_offset, key, remote_offset, length, trip.deadline)

    def _move(self, trip: Trip) -> TransferHandle | list[TransferResult] | None:
        """Moves a trip in this thread; returns what :meth:`conclude` does."""
        endpoint = trip.endpoint
        outcome: ChainOutcome | None = None
        again = False
        pinned = (trip.region,) if trip.request.length > SMALL_BYTES else ()
        try:
            if pinned and not self._memory.pin(pinned, endpoint, endpoint.abort):
                outcome = SHUTDOWN
            else:
                outcome = self.run(trip, waits=True)
        except EXPECTED as error:
            outcome, again = failure_of(error, endpoint)
        except BaseException:  # Ctrl-C, or a defect: how much was transferred is not known
            self.give_up(trip, TransferStatus.CANCELLED, Reason.SHUTDOWN)
            raise
        finally:
            if pinned:
                self._memory.unpin(pinned, endpoint)
        return self.conclude(trip, outcome, again, self._peers.run)

    def conclude(
        self, trip: Trip, outcome: ChainOutcome | None, again: bool, start: Callable[[Chain], None]
    ) -> TransferHandle | list[TransferResult] | None:
        """Ends a trip with its outcome. ``again``: a fresh endpoint may do; ``start`` begins its chain.

        Returns the result; a handle if a chain goes on with the request; None if it must go the long way."""
        way, endpoint = trip.way, trip.endpoint
        if self._peers.moving.pop(endpoint, None) is None:  # the trip was given up, and counted as such
            endpoint.close(hard=True)
            return [TransferResult(TransferStatus.TIMEOUT, 0, Reason.DEADLINE)]
        if outcome is DONE:
            way.endpoints.release(endpoint)
            request, meter = trip.request, self._meter
            elapsed_s = self._clock() - trip.started
            with meter.lock:
                meter.went_short(way.path, request.opcode, request.length, elapsed_s)
            return [TransferResult(TransferStatus.COMPLETED, request.length)]
        if outcome is None:
            way.endpoints.release(endpoint)
            return None
        return self._go_on(trip, outcome, again, start)

    def _go_on(
        self, trip: Trip, outcome: ChainOutcome, again: bool, start: Callable[[Chain], None]
    ) -> TransferHandle | list[TransferResult]:
        way, endpoint, fence = trip.way, trip.endpoint, 0
        if outcome is SHUTDOWN or outcome.status is TransferStatus.COMPLETED:
            way.endpoints.release(endpoint)
        else:
            way.endpoints.discard(endpoint)
            if trip.request.opcode is Opcode.WRITE:
                fence = endpoint.link.id
        fresh = outcome is SHUTDOWN or (again and not endpoint.aborted)
        if again:
            with self._meter.lock:
                self._meter.stats.retries += 1

        def take_up(chain: Chain) -> None:
            chain.fence = fence
            if fresh or not trip.peer.adopt(chain, way, outcome, trip.started):
                start(chain)

        left_s = max(trip.deadline - self._clock(), 0.001)
        try:
            return self._submissions.submit([trip.request], left_s, last=take_up, began=trip.started)
        except (EngineClosed, InvalidTransfer):  # the engine closed, or the region was unregistered, in the meantime
            return self.ended(trip, TransferStatus.CANCELLED, Reason.SHUTDOWN)
        except TransferLimitReached:
            if outcome.refusals is None:
                return self.ended(trip, TransferStatus.FAILED, outcome.reason)
            return self.ended(trip, TransferStatus.REFUSED, Reason(outcome.refusals[0]))

    def give_up(self, trip: Trip, status: TransferStatus, reason: Reason) -> None:
        """Ends a trip in the middle of its transfer."""
        if self._peers.moving.pop(trip.endpoint, None) is None:
            trip.endpoint.close(hard=True)
        else:
            trip.way.endpoints.discard(trip.endpoint)
            self.ended(trip, status, reason)

    def ended(self, trip: Trip, status: TransferStatus, reason: Reason) -> list[TransferResult]:
        """Counts a trip that is over without a chain, with nothing moved; returns its result."""
        with self._meter.lock:
            self._meter.finished(status, reason, 1, self._clock() - trip.started)
        return [TransferResult(status, 0, reason)]
