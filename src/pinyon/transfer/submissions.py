"""Submitted requests: how they become chains that run, and which have not ended yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pinyon.transfer.chains.chain import SHUTDOWN, Chain
from pinyon.transfer.chains.slicing import plan_chains
from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.region import Region
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.types.errors import EngineClosed, InvalidTransfer, TransferLimitReached
from pinyon.transfer.types.limits import MAX_BATCH_REQUESTS, MAX_REQUEST_BYTES, MAX_SUBMISSIONS
from pinyon.transfer.types.request import Opcode, Reason, TransferRequest, TransferStatus
from pinyon.transfer.types.segment import KEY_BYTES, SegmentDescriptor


class Submissions:
    """All submitted requests: checked, cut into chains, handed to peers, accounted for at the end. Thread-safe.

    Nothing is accepted before the engine sets ``running`` and after ``close``."""

    def __init__(self, context: EngineContext, peers: Peers, streams: Callable[[SegmentDescriptor], int]) -> None:
        """Takes ``streams``, which returns how many NICs a peer's chains are spread over."""
        self._memory = context.memory
        self._peers = peers
        self._streams = streams
        self._limits = context.limits
        self._meter = context.meter
        self._clock = context.clock
        self._lock = threading.Lock()
        self.running = False
        """True while requests are accepted."""
        self._closed = False
        self._live: dict[TransferHandle, int] = {}  # handle → requests in flight
        self._inflight_requests = 0
        self.queued_bytes = 0
        """Bytes submitted whose chains have not ended."""

    def close(self) -> list[TransferHandle]:
        """Stops everything in flight; returns the handles to wait for."""
        with self._lock:
            self.running, self._closed = False, True
            live = list(self._live)
        for handle in live:
            handle._stop(SHUTDOWN)
        return live

    def in_flight(self) -> int:
        """Returns the number of requests in flight, with those that callers move themselves."""
        with self._lock:
            return self._inflight_requests + len(self._peers.moving)

    @property
    def full(self) -> bool:
        """True if no further request is accepted."""
        return self._inflight_requests >= self._limits.max_inflight_requests

    def submit(
        self,
        requests: Sequence[TransferRequest],
        timeout_s: float | None,
        *,
        checksum: bool = True,
        last: Callable[[Chain], None] | None = None,
        began: float | None = None,
    ) -> TransferHandle:
        """Starts requests without blocking. ``last``, which may block, starts the last chain in place of its peer.

        Without ``checksum``, tcp payloads go without one. ``began`` is when the caller began to move the requests, if
        that was earlier. Raises InvalidTransfer, TransferLimitReached or EngineClosed."""
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidTransfer("timeout_s must be positive", field="timeout_s")
        if not 0 < len(requests) <= MAX_BATCH_REQUESTS:
            raise InvalidTransfer(f"submit 1 to {MAX_BATCH_REQUESTS} requests", field="requests")
        regions = self._check(requests)
        lengths = [request.length for request in requests]
        nbytes = sum(lengths)
        now = self._clock()
        with self._lock:
            if not self.running:
                raise EngineClosed("the engine is not running")
            if self._inflight_requests + len(requests) > self._limits.max_inflight_requests:
                raise TransferLimitReached(f"{self._inflight_requests} requests are in flight")
            if len(self._live) >= MAX_SUBMISSIONS:
                raise TransferLimitReached(f"{len(self._live)} submissions are in flight")
            budget = timeout_s if timeout_s is not None else self._limits.budget_s(nbytes + self.queued_bytes)
            deadline = now + budget
            handle = TransferHandle(lengths, now if began is None else began, deadline, self._chain_done, self._clock)
            self._inflight_requests += len(requests)
            self.queued_bytes += nbytes
            self._live[handle] = len(requests)
        locations = {key: region.location for key, region in regions.items()}
        plans = plan_chains(requests, self._limits, locations, self._streams)
        chains = [Chain(plan, regions, deadline, handle._chain_done) for plan in plans]
        for chain in chains:
            chain.checksum = checksum
        handle._start(chains)
        try:
            self._start(chains, regions, last or self._peers.submit)
        except BaseException:  # Ctrl-C while the last chain ran in its caller's thread
            handle.abandon()
            raise
        return handle

    def _start(self, chains: list[Chain], regions: dict[bytes, Region], last: Callable[[Chain], None]) -> None:
        ready: list[Chain] = []
        for chain in chains:
            if self._memory.pin(regions.values(), chain, chain.shut):
                if chain.done:  # it was cancelled, or the engine closed, before it was pinned
                    self._memory.unpin(regions.values(), chain)
                else:
                    ready.append(chain)
            else:  # a region was unregistered after the check
                chain.finish(SHUTDOWN)
        for chain in ready[:-1]:
            self._peers.submit(chain)
        for chain in ready[-1:]:
            last(chain)

    def _check(self, requests: Sequence[TransferRequest]) -> dict[bytes, Region]:
        """Returns the local regions by key; raises InvalidTransfer for the first request that makes no sense."""
        regions: dict[bytes, Region] = {}
        for position, request in enumerate(requests):
            try:
                opcode, local, local_offset, remote, remote_region, remote_offset, length = request
            except TypeError as error:  # compiled code checks the types here
                raise _mistyped(request, position) from error
            region = regions.get(local)
            if region is None:
                region = self._memory.get(local)
                if region is None:
                    if self._closed:  # the engine's regions are gone
                        raise EngineClosed("the engine is not running")
                    raise InvalidTransfer("no such local region", field=f"requests[{position}].local")
                regions[local] = region
            if length < 1 or length > MAX_REQUEST_BYTES:
                raise InvalidTransfer(
                    f"a request moves 1 to {MAX_REQUEST_BYTES} bytes", field=f"requests[{position}].length"
                )
            if local_offset < 0 or local_offset + length > region.length:
                raise InvalidTransfer("outside the local region", field=f"requests[{position}].local_offset")
            if remote_offset < 0 or remote_offset + length >= 1 << 63:
                raise InvalidTransfer("no such remote offset", field=f"requests[{position}].remote_offset")
            if type(opcode) is not Opcode:
                raise InvalidTransfer("not an Opcode", field=f"requests[{position}].opcode")
            if type(remote_region) is not bytes or len(remote_region) != KEY_BYTES:
                raise InvalidTransfer("not a region key", field=f"requests[{position}].remote_region")
            if type(remote) is not SegmentDescriptor:
                raise InvalidTransfer("not a segment descriptor", field=f"requests[{position}].remote")
        return regions

    def _chain_done(
        self,
        handle: TransferHandle,
        chain: Chain,
        finals: dict[tuple[TransferStatus, Reason], int],
        moved_bytes: int,
        started: float,
    ) -> None:
        """Accounts for an ended chain; ``finals`` is the number of requests that became final with it, per outcome."""
        ended = sum(finals.values())
        self._memory.unpin(chain.regions.values(), chain)
        with self._lock:
            self._inflight_requests -= ended
            self.queued_bytes -= chain.nbytes
            # Of chains that end at the same time, the one with the last final request need not come here last.
            left = self._live.get(handle, 0) - ended
            if left:
                self._live[handle] = left
            else:
                self._live.pop(handle, None)
        latency_s = self._clock() - started
        with self._meter.lock:
            for (status, reason), count in finals.items():
                self._meter.finished(status, reason, count, latency_s)
            self._meter.moved(chain.opcode, moved_bytes)


def _mistyped(request: Any, position: int) -> InvalidTransfer:
    """Returns the error for a request that has a part of a wrong type."""
    wanted = {"opcode": Opcode, "remote": SegmentDescriptor, "local": bytes, "remote_region": bytes}
    wrong = [name for name, kind in wanted.items() if type(getattr(request, name, None)) is not kind]
    field = wrong[0] if wrong else "length"
    what = {"opcode": "an Opcode", "remote": "a segment descriptor", "length": "numbers"}.get(field, "a region key")
    return InvalidTransfer(f"not {what}", field=f"requests[{position}].{field}")
