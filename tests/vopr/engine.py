"""A transfer engine whose wire is simulated: real regions, grants and keys, and bytes that take their time.

A transfer copies range by range between the memories of two processes, with pauses between. On the way it may be slow,
break off, or have bits flipped, and what was written may arrive a second time, late. As with the real engine, a key
that was taken back is refused, and who takes it back learns when nothing moves by it any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

from pinyon.transfer import (
    Access,
    Grant,
    Opcode,
    Reason,
    Region,
    SegmentDescriptor,
    TransferLimits,
    TransferRequest,
    TransferResult,
    TransferStatus,
)
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.types.segment import Range
from tests.vopr.late_frames import Move, double
from tests.vopr.loop import PROCESS, Process
from tests.vopr.network import Network

PORT = 7001
STALL_S = 2.0


class Wire:
    """The faults of all transfers, as shares of them, and the engines that are there. It tells the checker of all."""

    def __init__(self, network: Network, random: Random, watcher: Any) -> None:
        self.network, self.random, self.watcher = network, random, watcher
        self.engines: dict[tuple[str, bytes], SimEngine] = {}
        self.slow = self.breaks = self.flips = self.late = 0.0
        self.one_sided = random.random() < 0.3
        """True if memory is reached while its process is frozen, as by RDMA or shared memory."""
        self.struck: Counter[str] = Counter()

    def strikes(self, share: float, what: str) -> bool:
        hit = bool(share) and self.random.random() < share
        if hit:
            self.struck[what] += 1
        return hit


class _Plan(NamedTuple):
    """The fate of one transfer."""

    pause_s: float
    breaks_at: int
    flips_at: int


class SimEngine:
    """The engine of one process: the part of :class:`pinyon.transfer.TransferEngine` that the store uses."""

    def __init__(self, wire: Wire) -> None:
        self.process: Process = PROCESS.get()
        self.wire, self._loop = wire, self.process.loop
        self.boot_id = wire.random.randbytes(16)
        self.memory = MemoryTable(TransferLimits(), self.process.clock)
        self._host = self.process.name
        wire.engines[self._host, self.boot_id] = self
        self.moves: dict[Move, None] = {}
        """The transfers of peers that have pins here."""
        self._settling: list[asyncio.Future[None]] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.wire.engines.pop((self._host, self.boot_id), None)
        for move in list(self.moves):
            move.abort()

    # -- memory

    def register_local_memory(
        self, buffer: object, location: str | None = None, *, access: Access = Access.READ_WRITE
    ) -> Region:
        return self.memory.register(buffer, location, access)

    def grant(
        self, region: Region, ranges: Iterable[tuple[int, int]], access: Access, *, lifetime_s: float | None = None
    ) -> Grant:
        grant = self.memory.grant(region, ranges, access, lifetime_s)
        self.wire.watcher.granted(self, grant)
        return grant

    def extend(self, grant: Grant, lifetime_s: float) -> bool:
        return self.memory.extend(grant, lifetime_s)

    def view(self, key: bytes) -> memoryview | None:
        region = self.memory.get(key)
        return None if region is None else region.view

    def revoke_now(self, grant: Grant) -> bool:
        self.wire.watcher.revoking(self, grant)
        return self.memory.revoke_now(grant)

    async def revoke_async(self, grant: Grant) -> None:
        if self.revoke_now(grant):
            return
        end_s = self._loop.time() + STALL_S
        while grant._holders:
            waiting = self._loop.create_future()
            self._settling.append(waiting)
            left_s = end_s - self._loop.time()
            if left_s <= 0:
                for abort in list(grant._holders.values()):
                    abort()
                continue
            await asyncio.wait([waiting], timeout=left_s)

    def unpin(self, pinned: Iterable[Grant], holder: object) -> None:
        self.memory.unpin(pinned, holder)
        settling, self._settling = self._settling, []
        for each in settling:
            if not each.done():
                each.set_result(None)

    def descriptor(self, regions: Iterable[Region | Grant] = ()) -> SegmentDescriptor:
        return SegmentDescriptor(self._host, PORT, self.boot_id, tuple(each.descriptor() for each in regions))

    # -- moving bytes

    async def transfer_async(
        self, requests: Sequence[TransferRequest], timeout_s: float | None = None, *, checksum: bool = True
    ) -> list[TransferResult]:
        """Moves requests that all name one peer; returns a result for each."""
        wire = self.wire
        end_s = self._loop.time() + (timeout_s or 10.0)
        first = requests[0]
        results: list[TransferResult] = []
        move: Move | None = None
        try:
            why = await self._reach(first.remote, end_s)
            remote = wire.engines.get((first.remote.host, first.remote.boot_id))
            if why is not None or remote is None:
                return [_failed(why or Reason.STALE_SEGMENT)] * len(requests)
            ranges = [Range(each.remote_region, each.remote_offset, each.length) for each in requests]
            move = Move(self, remote, set())
            _, refusals, pinned = remote.memory.admit(first.opcode, ranges, move, move.abort)
            move.pinned |= pinned
            plan = self._plan(requests)
            for number, request in enumerate(requests):
                if refusals is not None and refusals[number]:
                    wire.watcher.refused(remote, request.remote_region, request.opcode)
                    results.append(TransferResult(TransferStatus.REFUSED, 0, Reason(refusals[number])))
                    continue
                why = await self._between(remote, move, plan.pause_s, end_s)
                if why is None and number == plan.breaks_at:
                    why = Reason.CONNECTION_LOST
                if why is not None:
                    self._leave_late(remote, request, why)
                    results += [_failed(why)] * (len(requests) - number)
                    break
                self._copy(remote, request, flip=number == plan.flips_at)
                results.append(TransferResult(TransferStatus.COMPLETED, request.length))
            return results
        finally:
            if move is not None:
                move.end()

    def _plan(self, requests: Sequence[TransferRequest]) -> _Plan:
        wire, count = self.wire, len(requests)
        pause_s = wire.random.uniform(0.2, 6.0) / count if wire.strikes(wire.slow, "transfer slow") else 0.0
        breaks_at = wire.random.randrange(count) if wire.strikes(wire.breaks, "transfer broken") else -1
        flips_at = wire.random.randrange(count) if wire.strikes(wire.flips, "flip on the wire") else -1
        return _Plan(pause_s, breaks_at, flips_at)

    async def _reach(self, peer: SegmentDescriptor, end_s: float) -> Reason | None:
        """Waits until the request is at the peer; returns why it never is."""
        network = self.wire.network
        if network.reaches(self._host, peer.host):
            await asyncio.sleep(network.delay_s())
            return None
        await asyncio.sleep(max(0.0, min(STALL_S, end_s - self._loop.time())))
        return Reason.STALLED

    async def _between(self, remote: SimEngine, move: Move, pause_s: float, end_s: float) -> Reason | None:
        """Lets time pass; returns why nothing moves any more, if so."""
        if pause_s or self.wire.random.random() < 0.5:
            left_s = max(0.0, end_s - self._loop.time())
            await asyncio.sleep(min(left_s, pause_s or self.wire.network.delay_s()))
        if remote.process.frozen and not self.wire.one_sided:
            waited = min(STALL_S, max(0.0, end_s - self._loop.time()))
            try:
                async with asyncio.timeout(waited):
                    await remote.process.thawed()
            except TimeoutError:
                return Reason.STALLED
        if remote.process.dead or remote.closed or move.aborted:
            return Reason.CONNECTION_LOST
        if not self.wire.network.reaches(self._host, remote._host):
            return Reason.STALLED
        return Reason.DEADLINE if self._loop.time() >= end_s else None

    def _copy(self, remote: SimEngine, request: TransferRequest, *, flip: bool) -> None:
        wire = self.wire
        here, there = self.view(request.local), remote.view_of_grant(request.remote_region)
        assert here is not None
        assert there is not None
        here = here[request.local_offset : request.local_offset + request.length]
        there = there[request.remote_offset : request.remote_offset + request.length]
        if request.opcode is Opcode.READ:
            wire.watcher.reading(remote, request.remote_region, request.remote_offset, request.length)
            here[:] = there
            changed = here
        else:
            wire.watcher.landing(self, remote, request.remote_offset, request.length, flipped=flip)
            there[:] = here
            changed = there
            if wire.strikes(wire.late, "write doubled"):
                double(self, remote, request, bytes(here))
        if flip:
            changed[wire.random.randrange(len(changed))] ^= 1 << wire.random.randrange(8)

    def view_of_grant(self, key: bytes) -> Any:
        """Returns the memory that a key opens, or opened when the transfer under way was admitted."""
        for each in (*self.memory._open.values(), *(grant for move in self.moves for grant in move.pinned)):
            if each.key == key:
                return each.region.view
        return None

    def _leave_late(self, remote: SimEngine, request: TransferRequest, why: Reason) -> None:
        """Lets the frame that was under way when a WRITE was given up arrive all the same."""
        if request.opcode is Opcode.WRITE and why is not Reason.CONNECTION_LOST:
            here = self.view(request.local)
            assert here is not None
            double(self, remote, request, bytes(here[request.local_offset : request.local_offset + request.length]))


def _failed(why: Reason) -> TransferResult:
    timeout = why in (Reason.STALLED, Reason.DEADLINE)
    status = TransferStatus.TIMEOUT if timeout else TransferStatus.FAILED
    return TransferResult(status, 0, why)
