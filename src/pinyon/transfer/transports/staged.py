"""Staging of device memory in pinned host memory, for transports that cannot reach the device themselves.

On the initiator's side the transport gets a substitute chain whose slices lie in the pool. The payload of a WRITE is
copied out of the device before; the payload of a READ is copied in afterwards, before the end is reported. The serving
side does the same with the ranges of a frame. Each side has its own pool: an initiator that waits for its peer must not
hold buffers that the peer's initiators wait for here.

Within one chain nothing overlaps; the chains that a path runs at the same time overlap copies with the wire."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pinyon.transfer.chains.chain import GONE, INTERNAL, LATE, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.links.stream import Stalled
from pinyon.transfer.memory.device import DeviceError, DeviceMemory
from pinyon.transfer.memory.region import Region
from pinyon.transfer.memory.staging_pool import StagingBuffer, StagingPool
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import Range

_log = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """A range of device memory and its offset in the staging buffer."""

    device: DeviceMemory
    offset: int
    staged: int
    length: int


class _Copies:
    """The copies to make between devices and a staging buffer, with neighbours joined."""

    def __init__(self) -> None:
        self.list: list[_Copy] = []

    def add(self, device: DeviceMemory, offset: int, staged: int, length: int) -> None:
        if self.list:
            last = self.list[-1]
            if last.device is device and last.offset + last.length == offset and last.staged + last.length == staged:
                self.list[-1] = last._replace(length=last.length + length)
                return
        self.list.append(_Copy(device, offset, staged, length))

    def run(self, buffer: StagingBuffer, stopped: Callable[[], bool], *, into: bool) -> bool:
        """Copies from the devices, or ``into`` them. Returns False if it was stopped. Raises DeviceError."""
        for device, offset, staged, length in self.list:
            if stopped():
                return False
            (device.copy_in if into else device.copy_out)(offset, buffer.view(staged, length))
        return True


# --- the initiator's side ---


def needs_staging(chain: Chain, path: Path) -> bool:
    """Returns whether any local memory of the chain is on a device that the path's transport does not reach itself."""
    direct = path.transport == "rdma"
    for key in {part.local for part in chain.slices}:
        region = chain.regions.get(key)
        if region is not None and region.device is not None and not (direct and region.direct):
            return True
    return False


def run_staged(transport: Transport, chain: Chain, path: Path, pool: StagingPool) -> ChainOutcome:
    """Does what ``transport.run`` does, by the same contract, for a chain that needs staging."""
    refusals = bytearray(len(chain.slices))
    for positions, parts, nbytes in _pieces(chain, pool.piece_bytes):
        try:
            buffer = pool.acquire(nbytes, chain.deadline, lambda: chain.done) if nbytes else None
        except DeviceError as error:
            _log.error("a transfer of device memory failed: %s", error)
            return INTERNAL
        if nbytes and buffer is None:
            return GONE if chain.done else LATE if pool.clock() >= chain.deadline else SHUTDOWN
        with buffer or contextlib.nullcontext():
            outcome = _run_piece(transport, chain, path, parts, buffer)
        if outcome.status is not TransferStatus.COMPLETED:
            return outcome
        for position, code in zip(positions, outcome.refusals or (), strict=False):
            refusals[position] = refusals[position] or code
    return ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, bytes(refusals) if any(refusals) else None)


def _pieces(chain: Chain, most: int) -> Iterator[tuple[list[int], list[Slice], int]]:
    """Yields the chain in order, in pieces with at most ``most`` bytes of device memory.

    A piece is the positions of its slices, the slices or their parts, and the number of bytes to stage."""
    positions: list[int] = []
    parts: list[Slice] = []
    nbytes = 0
    for position, part in enumerate(chain.slices):
        request, local, local_offset, remote_region, remote_offset, length = part
        if chain.regions[local].device is None:
            positions.append(position)
            parts.append(part)
            continue
        while length:
            if nbytes == most:
                yield positions, parts, nbytes
                positions, parts, nbytes = [], [], 0
            taken = min(length, most - nbytes)
            positions.append(position)
            parts.append(Slice(request, local, local_offset, remote_region, remote_offset, taken))
            nbytes += taken
            local_offset += taken
            remote_offset += taken
            length -= taken
    if parts:
        yield positions, parts, nbytes


def _run_piece(
    transport: Transport, chain: Chain, path: Path, parts: list[Slice], buffer: StagingBuffer | None
) -> ChainOutcome:
    staged = _StagedChain(chain, parts, buffer)
    try:
        outcome = transport.run(staged, path)
        chain.fence = staged.fence
        if staged.failed:
            return INTERNAL
        if outcome.status is TransferStatus.COMPLETED and chain.opcode is Opcode.READ:
            return outcome if staged.land(outcome.refusals) else GONE
    except DeviceError as error:
        _log.error("copying to a device failed: %s", error)
        outcome = INTERNAL
    finally:
        stopped = staged.claimed and not chain.unclaim()
    return GONE if stopped else outcome


class _StagedChain(Chain):
    """The substitute for a chain, or for a piece of one, whose local memory is on a device.

    The real chain is claimed from the transport's claim until the copies back have ended, and can end only then. An
    endpoint may be aborted for the chain only while the transport itself holds the claim."""

    __slots__ = ("_buffer", "_parts", "_whole", "claimed", "failed")

    def __init__(self, whole: Chain, parts: list[Slice], buffer: StagingBuffer | None) -> None:
        self._whole = whole
        self._parts = parts
        self._buffer = buffer
        self.claimed = False
        """True once this substitute has claimed the real chain."""
        self.failed = False
        """True if the copy from the device failed."""
        regions = dict(whole.regions)
        slices: list[Slice] = []
        at = buffer.start if buffer is not None else 0
        for part in parts:
            if buffer is None or whole.regions[part.local].device is None:
                slices.append(part)
            else:
                slices.append(part._replace(local=buffer.region.key, local_offset=at))
                at += part.length
        if buffer is not None:
            regions[buffer.region.key] = buffer.region
        plan = ChainPlan(whole.remote, whole.opcode, slices, sum(part.length for part in parts))
        super().__init__(plan, regions, whole.deadline, lambda chain, outcome: None)
        self.fence = whole.fence

    def _copies(self, refusals: bytes | None) -> _Copies:
        copies = _Copies()
        for position, (part, staged) in enumerate(zip(self._parts, self.slices, strict=True)):
            device = self._whole.regions[part.local].device
            if device is not None and not (refusals is not None and refusals[position]):
                copies.add(device, part.local_offset, staged.local_offset, part.length)
        return copies

    def _stopped(self) -> bool:
        return self._whole.stopped

    @property
    def done(self) -> bool:
        """True once the real chain has ended, so that waits on its behalf may stop."""
        return self._whole.done

    @done.setter
    def done(self, value: bool) -> None:
        return  # the base class sets False at first; the real chain's own flag counts

    def claim(self, abort: Callable[[], None]) -> bool:
        """Claims the real chain and stages the payload of a WRITE. Returns False if either fails or is stopped."""
        if not self._whole.claim(lambda: None):
            return False
        again, self.claimed = self.claimed, True
        if self.opcode is Opcode.WRITE and self._buffer is not None and not again:
            try:
                if not self._copies(None).run(self._buffer, self._stopped, into=False):
                    return False
            except DeviceError as error:
                _log.error("copying from a device failed: %s", error)
                self.failed = True
                return False
        # Named only now: an endpoint must not be aborted for a chain that does not run on it.
        self._whole.claim(abort)
        if self._whole.stopped:
            abort()  # the stop may have come before the line above
        return True

    def unclaim(self) -> bool:
        """Ends the transport's part; the real chain stays claimed. Returns False if the chain was stopped."""
        self._whole.claim(lambda: None)
        return not self._whole.stopped

    def land(self, refusals: bytes | None) -> bool:
        """Copies a READ's payload to the device, without refused slices; False: stopped. Raises DeviceError."""
        return self._buffer is None or self._copies(refusals).run(self._buffer, self._stopped, into=True)


# --- the serving side ---


class StagedRanges:
    """A peer's ranges with staged host memory in place of device memory. Their ``buffer`` must be released."""

    def __init__(self, ranges: Sequence[Range], found: Sequence[Region | None], buffer: StagingBuffer) -> None:
        self.buffer = buffer
        self._copies = _Copies()
        self.ranges: list[Range] = []
        self.found: list[Region | None] = []
        at = buffer.start
        for one, region in zip(ranges, found, strict=True):
            if region is None or region.device is None:
                self.ranges.append(one)
                self.found.append(region)
                continue
            key, offset, length = one
            self._copies.add(region.device, offset, at, length)
            self.ranges.append(Range(key, at, length))
            self.found.append(buffer.region)
            at += length

    def land(self) -> None:
        """Copies the payload of a WRITE, which has arrived, into the devices. Raises DeviceError."""
        self._copies.run(self.buffer, _never, into=True)


def stage_ranges(
    pool: StagingPool, opcode: int, ranges: Sequence[Range], found: Sequence[Region | None], deadline: float
) -> StagedRanges | None:
    """Returns host memory to serve a peer's ranges with, filled for a READ; None if no device memory is among them.

    The caller has pinned the regions, and keeps them pinned until it has released the result's buffer. Raises
    DeviceError if copying failed, and Stalled if there was no room until ``deadline``."""
    nbytes = sum(
        length
        for (_, _, length), region in zip(ranges, found, strict=True)
        if region is not None and region.device is not None
    )
    if not nbytes:
        return None
    buffer = pool.acquire(nbytes, deadline, _never)
    if buffer is None:
        raise Stalled
    try:
        staged = StagedRanges(ranges, found, buffer)
        if opcode == Opcode.READ:
            staged._copies.run(buffer, _never, into=False)
    except BaseException:
        buffer.release()
        raise
    return staged


def _never() -> bool:
    return False
