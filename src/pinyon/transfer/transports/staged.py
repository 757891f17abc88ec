"""Memory of devices by way of pinned host memory, for transports that cannot reach it themselves.

The initiator's side gives the transport a substitute chain whose slices lie in the pool: what is WRITTEN is copied out
of the device before, what is READ is copied in afterwards and before anybody hears of the end. The serving side does
the same with the ranges of a frame. The two have a pool each: an initiator that waits for its peer must not hold what
the peer's own initiators wait for here.

Nothing overlaps inside one chain; the several chains that a path runs at a time overlap copies with the wire.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pinyon.transfer.chains.chain import GONE, LATE, LOST, SHUTDOWN, Chain, Outcome
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
_INTERNAL = Outcome(TransferStatus.FAILED, Reason.INTERNAL)


class _Copy(NamedTuple):
    """Bytes of a device and where they are staged."""

    device: DeviceMemory
    offset: int
    staged: int
    length: int


class _Copies:
    """What to copy, neighbours joined."""

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
        """From the devices, or ``into`` them. False: stopped. Raises DeviceError."""
        for device, offset, staged, length in self.list:
            if stopped():
                return False
            (device.copy_in if into else device.copy_out)(offset, buffer.view(staged, length))
        return True


# --- the initiator's side ---


def needs_staging(chain: Chain, path: Path) -> bool:
    """Is any of the chain's local memory on a device that the path's transport does not reach itself?"""
    direct = path.transport == "rdma"
    for key in {part.local for part in chain.slices}:
        region = chain.regions.get(key)
        if region is not None and region.device is not None and not (direct and region.direct):
            return True
    return False


def run_staged(transport: Transport, chain: Chain, path: Path, pool: StagingPool) -> Outcome:
    """``transport.run`` for a chain that needs staging. Same contract."""
    refusals = bytearray(len(chain.slices))
    for positions, parts, nbytes in _pieces(chain, pool.piece_bytes):
        try:
            buffer = pool.acquire(nbytes, chain.deadline, lambda: chain.done) if nbytes else None
        except DeviceError as error:
            _log.error("a transfer of device memory cannot be staged: %s", error)
            return _INTERNAL
        if nbytes and buffer is None:
            return GONE if chain.done else LATE if pool.clock() >= chain.deadline else SHUTDOWN
        with buffer or contextlib.nullcontext():
            outcome = _run_piece(transport, chain, path, parts, buffer)
        if outcome.status is not TransferStatus.COMPLETED:
            return outcome
        for position, code in zip(positions, outcome.refusals or (), strict=False):
            refusals[position] = refusals[position] or code
    return Outcome(TransferStatus.COMPLETED, Reason.NONE, bytes(refusals) if any(refusals) else None)


def _pieces(chain: Chain, most: int) -> Iterator[tuple[list[int], list[Slice], int]]:
    """The chain in order, in runs of at most ``most`` bytes of device memory: positions of the slices that they are
    (parts of), the parts, and how many bytes of them are to be staged."""
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
) -> Outcome:
    """The real chain is claimed meanwhile: it may end only when the copies have. Who stops it stops the substitute."""
    substitute = _substitute(chain, parts, buffer)
    if not chain.claim(lambda: substitute.stop(GONE)):
        return GONE
    try:
        outcome = _move(transport, chain, path, substitute, parts, buffer)
    except DeviceError as error:
        _log.error("a transfer of device memory failed: %s", error)
        outcome = _INTERNAL
    finally:
        chain.fence = substitute.fence
        stopped = not chain.unclaim()
    if stopped:
        return GONE
    return LOST if outcome is GONE else outcome  # its path is gone: it goes on over another one


def _substitute(chain: Chain, parts: list[Slice], buffer: StagingBuffer | None) -> Chain:
    """What the transport sees: in place of device memory, the pool's."""
    regions = dict(chain.regions)
    slices: list[Slice] = []
    at = buffer.start if buffer is not None else 0
    for part in parts:
        if buffer is None or chain.regions[part.local].device is None:
            slices.append(part)
        else:
            slices.append(part._replace(local=buffer.region.key, local_offset=at))
            at += part.length
    if buffer is not None:
        regions[buffer.region.key] = buffer.region
    plan = ChainPlan(chain.remote, chain.opcode, slices, sum(part.length for part in parts))
    substitute = Chain(plan, regions, chain.deadline, _ignore)
    substitute.fence, substitute.elsewhere = chain.fence, chain.elsewhere
    return substitute


def _move(
    transport: Transport, chain: Chain, path: Path, substitute: Chain, parts: list[Slice], buffer: StagingBuffer | None
) -> Outcome:
    """Raises DeviceError."""
    if chain.opcode is Opcode.WRITE and not _copy(chain, substitute, parts, None, buffer):
        return GONE
    outcome = transport.run(substitute, path)
    if chain.opcode is Opcode.READ and outcome.status is TransferStatus.COMPLETED:
        return outcome if _copy(chain, substitute, parts, outcome.refusals, buffer) else GONE
    return outcome


def _copy(
    chain: Chain, substitute: Chain, parts: list[Slice], refusals: bytes | None, buffer: StagingBuffer | None
) -> bool:
    """What was READ to the devices, what is to be WRITTEN from them, without what was refused. False: stopped. Raises
    DeviceError."""
    copies = _Copies()
    for position, (part, staged) in enumerate(zip(parts, substitute.slices, strict=True)):
        device = chain.regions[part.local].device
        if device is not None and not (refusals is not None and refusals[position]):
            copies.add(device, part.local_offset, staged.local_offset, part.length)
    reading = chain.opcode is Opcode.READ
    return buffer is None or copies.run(buffer, lambda: substitute.done, into=reading)


def _ignore(chain: Chain, outcome: Outcome) -> None:
    return


# --- the serving side ---


class StagedRanges:
    """Ranges that a peer asked for, with staged host memory in the place of device memory. Release it."""

    def __init__(self, ranges: Sequence[Range], found: Sequence[Region | None], buffer: StagingBuffer) -> None:
        self._buffer = buffer
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
        """For a WRITE that has arrived: into the devices. Raises DeviceError."""
        self._copies.run(self._buffer, _never, into=True)

    def release(self) -> None:
        self._buffer.release()


def stage_ranges(
    pool: StagingPool, opcode: int, ranges: Sequence[Range], found: Sequence[Region | None], deadline: float
) -> StagedRanges | None:
    """Host memory to serve a peer's ranges with, filled if it is for a READ; None when no device is among them.

    The regions are pinned by the caller, and stay so until it has released this. Raises DeviceError: copying failed;
    Stalled: there was no room for too long."""
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
