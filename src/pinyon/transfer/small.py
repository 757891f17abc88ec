"""Small blocking transfers, moved by their caller's thread: one request by the short way, several as one chain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pinyon.core.clock import Clock
from pinyon.transfer.chains.chain import DONE, LATE, SHUTDOWN, Chain, Outcome
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.endpoint import Endpoint
from pinyon.transfer.links.endpoints import EXPECTED, Endpoints, failure_of
from pinyon.transfer.memory.region import Region
from pinyon.transfer.memory.table import SMALL_BYTES
from pinyon.transfer.paths.peer import Peer
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.paths.short_way import ShortWay
from pinyon.transfer.types.errors import EngineClosed
from pinyon.transfer.types.request import Opcode, Reason, TransferRequest, TransferResult, TransferStatus
from pinyon.transfer.types.segment import KEY_BYTES, SegmentDescriptor

__all__ = ["InlineCall", "SmallTransfers", "Trip"]


class InlineCall:
    """The end of the one chain of a small blocking transfer, which its caller runs itself: nothing to look up, and no
    event unless the chain has to go another way."""

    __slots__ = ("_clock", "_event", "outcome")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.outcome: Outcome | None = None
        self._event: threading.Event | None = None

    def finished(self, chain: Chain, outcome: Outcome) -> None:
        """The chain's completion callback."""
        self.outcome = outcome
        if self._event is not None:
            self._event.set()

    def wait(self, chain: Chain) -> Outcome:
        """How the chain ended; at its deadline it is ended."""
        self._event = event = threading.Event()
        deadline = chain.deadline
        while self.outcome is None and not event.wait(max(0.0, deadline - self._clock())):
            chain.stop(LATE)
            deadline = self._clock() + 0.1
        assert self.outcome is not None
        return self.outcome


def results_of(chain: Chain, outcome: Outcome) -> list[TransferResult]:
    """Of a chain whose slice i is all of request i."""
    status, reason, refusals = outcome
    if status is not TransferStatus.COMPLETED:
        return [TransferResult(status, 0, reason)] * len(chain.slices)
    if refusals is None:
        return [TransferResult(status, part.length) for part in chain.slices]
    return [
        TransferResult(TransferStatus.REFUSED, 0, Reason(code)) if code else TransferResult(status, part.length)
        for part, code in zip(chain.slices, refusals, strict=True)
    ]


class Trip:
    """One request on the short way, with the endpoint that it has to itself."""

    __slots__ = ("deadline", "endpoint", "endpoints", "peer", "region", "request", "started", "way")

    def __init__(
        self,
        request: TransferRequest,
        region: Region,
        peer: Peer,
        way: ShortWay,
        endpoints: Endpoints[Any],
        endpoint: Endpoint,
        started: float,
        deadline: float,
    ) -> None:
        self.request = request
        self.region = region
        self.peer = peer
        self.way = way
        self.endpoints = endpoints
        """Where it came from: given back, or struck off, when the trip is over."""
        self.endpoint = endpoint
        self.started = started
        self.deadline = deadline


class SmallTransfers:
    """Those that are under way. Thread-safe."""

    def __init__(self, context: EngineContext, peers: Peers) -> None:
        self.running = False
        """The engine takes requests."""
        self._memory = context.memory
        self._peers = peers
        limits = self._limits = context.limits
        self._meter = context.meter
        self._clock = context.clock
        self._most_bytes = min(limits.stripe_min_bytes, limits.max_frame_bytes)
        """What is larger may be more than one chain."""
        self._chains: dict[Chain, int] = {}
        """With the number of their requests."""

    def chains(self) -> list[Chain]:
        """One for each that is under way as such."""
        return list(self._chains)

    def counts(self) -> list[int]:
        """The numbers of requests of all that are under way."""
        return [*self._chains.values(), *([1] * len(self._peers.moving))]

    def set_out(
        self, request: TransferRequest, timeout_s: float | None, queued_bytes: int, most_bytes: int
    ) -> Trip | None:
        """Check one request and take an endpoint that lies ready. Here every call shows in the latency.
        ``queued_bytes``: what the engine has to do besides, for the deadline. Returns what is :meth:`arrived` or
        :meth:`begin_again` later. None: nothing was done, it has to go the long way, which also says what is wrong with
        it."""
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
        ):
            return None
        peer = self._peers.find(remote.peer)
        if peer is None:
            return None
        published = remote.region(key)
        there = published.location if published is not None else ""
        way = peer.short_way(remote, region.location, there, opcode, length)
        if way is None or way.endpoints is None or length > way.most_bytes:
            return None
        endpoints = way.endpoints
        endpoint: Endpoint | None = endpoints.lend(way.key)
        if endpoint is None:
            return None
        peer.last_used = started = self._clock()
        budget_s = timeout_s if timeout_s is not None else self._limits.budget_s(length + queued_bytes)
        self._peers.moving[endpoint] = way.path
        return Trip(request, region, peer, way, endpoints, endpoint, started, started + budget_s)

    def move(self, request: TransferRequest, timeout_s: float | None, queued_bytes: int) -> list[TransferResult] | None:
        """One request by the short way: over an endpoint that lies ready, in this thread, without a chain, for as long
        as nothing goes wrong. Arguments and None: see :meth:`set_out`."""
        trip = self.set_out(request, timeout_s, queued_bytes, self._most_bytes)
        if trip is None:
            return None
        opcode, _, local_offset, _, key, remote_offset, length = request
        region, endpoint = trip.region, trip.endpoint
        outcome: Outcome | None = None
        again = False
        pinned = length > SMALL_BYTES
        try:
            if pinned and not self._memory.pin((region,), endpoint, endpoint.abort):
                outcome = SHUTDOWN
            elif self.running and trip.way.open:
                outcome = endpoint.move(opcode, region, local_offset, key, remote_offset, length, trip.deadline)
        except EXPECTED as error:
            outcome, again = failure_of(error, endpoint)
        except BaseException:  # Ctrl-C, or a defect: nobody knows how far it came
            trip.endpoints.discard(endpoint)
            raise
        finally:
            if pinned:
                self._memory.unpin((region,), endpoint)
            del self._peers.moving[endpoint]
        if outcome is DONE:
            return self.arrived(trip)
        if outcome is None:
            trip.endpoints.release(endpoint)
            return None
        go_on = self.begin_again(trip, outcome, again, self._peers.run)
        return self._run(self._plan(request, region), {request.local: region}, trip.started, trip.deadline, go_on)

    def arrived(self, trip: Trip) -> list[TransferResult]:
        """All of it was moved."""
        request = trip.request
        trip.endpoints.release(trip.endpoint)
        elapsed_s = self._clock() - trip.started
        meter = self._meter
        with meter.lock:
            meter.went_short(trip.way.path, request.opcode, request.length, elapsed_s)
        return [TransferResult(TransferStatus.COMPLETED, request.length)]

    def disown(self, trip: Trip) -> None:
        """Its caller has not gone on for too long; if he does, he closes the endpoint."""
        trip.endpoints.disown(trip.endpoint)

    def begin_again(
        self, trip: Trip, outcome: Outcome, again: bool, start: Callable[[Chain], None]
    ) -> Callable[[Chain], None]:
        """It ended so, but not well (``again``: a fresh endpoint may do). Returns what makes a chain go on with it:
        ``start`` is for one that begins."""
        way, endpoint, peer = trip.way, trip.endpoint, trip.peer
        fence = 0
        if outcome is SHUTDOWN or outcome.status is TransferStatus.COMPLETED:
            trip.endpoints.release(endpoint)
        else:
            trip.endpoints.discard(endpoint)
            if trip.request.opcode is Opcode.WRITE:
                fence = endpoint.link.id
        fresh = outcome is SHUTDOWN or (again and not endpoint.aborted)

        def go_on(chain: Chain) -> None:
            chain.fence = fence
            if fresh or not peer.adopt(chain, way, outcome, trip.started):
                start(chain)

        if again:
            with self._meter.lock:
                self._meter.retries += 1
        return go_on

    @staticmethod
    def _plan(request: TransferRequest, region: Region) -> ChainPlan:
        opcode, local, local_offset, remote, remote_region, remote_offset, length = request
        published = remote.region(remote_region)
        slices = [Slice(0, local, local_offset, remote_region, remote_offset, length)]
        there = published.location if published is not None else ""
        return ChainPlan(remote, opcode, slices, length, region.location, there)

    def run(self, plan: ChainPlan, regions: dict[bytes, Region], budget_s: float) -> list[TransferResult]:
        """Several requests, or one that cannot go the short way, as one chain, whose slice i is all of request i.
        Raises EngineClosed."""
        if not self.running:
            raise EngineClosed("the engine is not running")
        now = self._clock()
        return self._run(plan, regions, now, now + budget_s, self._peers.run)

    def _run(
        self,
        plan: ChainPlan,
        regions: dict[bytes, Region],
        started: float,
        deadline: float,
        start: Callable[[Chain], None],
    ) -> list[TransferResult]:
        count = len(plan.slices)
        call = InlineCall(self._clock)
        chain = Chain(plan, regions, deadline, call.finished)
        self._chains[chain] = count  # before the state is read: whoever closes does it the other way round
        try:
            if self.running and self._memory.pin(regions.values(), chain, chain.shut):
                try:
                    start(chain)
                    outcome = call.outcome or call.wait(chain)
                finally:
                    if call.outcome is None:  # interrupted, as by Ctrl-C, while the chain is in another thread
                        chain.shut()
                        call.wait(chain)
                    self._memory.unpin(regions.values(), chain)
            else:  # closed, or unregistered, since it was looked at
                outcome = SHUTDOWN
        finally:
            del self._chains[chain]
        results = results_of(chain, outcome)
        latency_s = self._clock() - started
        with self._meter.lock:
            if outcome.status is TransferStatus.COMPLETED and outcome.refusals is None:
                self._meter.finished(TransferStatus.COMPLETED, Reason.NONE, count, latency_s)
                self._meter.moved(chain.opcode, chain.nbytes)
            else:
                for status, moved, reason in results:
                    self._meter.finished(status, reason, 1, latency_s)
                    self._meter.moved(chain.opcode, moved)
        return results
