"""The short way of a small blocking transfer: one chain, run by its caller's thread unless its path fails."""

from __future__ import annotations

import threading

from pinyon.core.clock import Clock
from pinyon.transfer.chain import LATE, SHUTDOWN, Chain, Outcome
from pinyon.transfer.errors import EngineClosed
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.memory.region import Region
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.request import Opcode, Reason, TransferRequest, TransferResult, TransferStatus
from pinyon.transfer.segment import KEY_BYTES, SegmentDescriptor
from pinyon.transfer.slicing import ChainPlan, Slice
from pinyon.transfer.stats import Meter

__all__ = ["InlineCall", "SmallTransfers"]

_SMALL_BYTES = 64 << 10


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


class SmallTransfers:
    """Those that are under way. Thread-safe."""

    def __init__(
        self,
        memory: MemoryTable,
        peers: Peers,
        limits: TransferLimits,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self.running = False
        """The engine takes requests."""
        self._memory = memory
        self._peers = peers
        self._meter = meter
        self._clock = clock
        self._most_bytes = min(_SMALL_BYTES, limits.stripe_min_bytes, limits.max_frame_bytes)
        self._chains: dict[Chain, int] = {}
        """With the number of their requests."""

    def chains(self) -> list[Chain]:
        """One for each that is under way."""
        return list(self._chains)

    def counts(self) -> list[int]:
        """The numbers of their requests."""
        return list(self._chains.values())

    def plan(self, request: TransferRequest) -> tuple[ChainPlan, dict[bytes, Region]] | None:
        """``Submissions``' check and ``plan_one`` in one go, for a single small request: here every call shows in the
        latency. None: not so small, or something is wrong with it; the long way says what."""
        opcode, local, local_offset, remote, remote_region, remote_offset, length = request
        region = self._memory.get(local)
        if (
            region is None
            or not 0 < length <= self._most_bytes
            or local_offset < 0
            or local_offset + length > region.length
            or not 0 <= remote_offset < 1 << 62
            or type(opcode) is not Opcode
            or type(remote_region) is not bytes
            or len(remote_region) != KEY_BYTES
            or type(remote) is not SegmentDescriptor
        ):
            return None
        published = remote.region(remote_region)
        slices = [Slice(0, local, local_offset, remote_region, remote_offset, length)]
        there = published.location if published is not None else ""
        return ChainPlan(remote, opcode, slices, length, region.location, there), {local: region}

    def run(self, plan: ChainPlan, regions: dict[bytes, Region], budget_s: float) -> list[TransferResult]:
        """
        Raises:
            EngineClosed
        """
        count = len(plan.slices)
        started = self._clock()
        call = InlineCall(self._clock)
        chain = Chain(plan, regions, started + budget_s, call.finished)
        self._chains[chain] = count  # before the state is read: whoever closes does it the other way round
        try:
            if not self.running:
                raise EngineClosed("the engine is not running")
            if self._memory.pin(regions.values(), chain, chain.shut):
                try:
                    self._peers.run(chain)
                    outcome = call.outcome or call.wait(chain)
                finally:
                    if call.outcome is None:  # interrupted, as by Ctrl-C, while the chain is in another thread
                        chain.shut()
                        call.wait(chain)
                    self._memory.unpin(regions.values(), chain)
            else:  # unregistered since the check above
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
