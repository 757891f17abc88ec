"""Staging of device memory in pinned host memory, for transports that cannot reach the device themselves.

On the initiator's side the transport gets a substitute chain whose slices lie in the pool. The payload of a WRITE is
copied out of the device before; the payload of a READ is copied in afterwards, before the end is reported. The serving
side does the same with the ranges of a frame. Each side has its own pool: an initiator that waits for its peer must not
hold buffers that the peer's initiators wait for here.

Within one chain nothing overlaps; the chains that a path runs at the same time overlap copies with the wire."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pinyon.transfer.chains.chain import GONE, INTERNAL, LATE, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.chains.slicing import ChainPlan
from pinyon.transfer.links.stream import Stalled
from pinyon.transfer.memory.device import DeviceError, DeviceMemory
from pinyon.transfer.memory.region import Region
from pinyon.transfer.memory.staging_pool import StagingBuffer, StagingPool
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.request import Opcode, TransferStatus
from pinyon.transfer.types.segment import Range

_log = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """A range of device memory and its offset in the staging buffer."""

    position: int
    device: DeviceMemory
    offset: int
    staged: int
    length: int


class _Copies:
    """The copies to make between devices and a staging buffer, which is filled in order."""

    def __init__(self, buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self._end = buffer.start
        self._list: list[_Copy] = []

    def add(self, position: int, device: DeviceMemory, offset: int, length: int) -> int:
        """Gives the next place in the buffer to this range, the one at ``position`` of all; returns the place."""
        place = self._end
        self._end += length
        self._list.append(_Copy(position, device, offset, place, length))
        return place

    def run(self, stopped: Callable[[], bool], refusals: bytes | None = None, *, into: bool) -> bool:
        """Copies what is not refused from the devices, or ``into`` them, with neighbours joined.

        Returns False if it was stopped. Raises DeviceError."""
        joined: list[_Copy] = []
        for each in self._list:
            if refusals is not None and refusals[each.position]:
                continue
            if joined:
                last = joined[-1]
                ends = last.device, last.offset + last.length, last.staged + last.length
                if ends == (each.device, each.offset, each.staged):
                    joined[-1] = last._replace(length=last.length + each.length)
                    continue
            joined.append(each)
        for _, device, offset, staged, length in joined:
            if stopped():
                return False
            (device.copy_in if into else device.copy_out)(offset, self._buffer.view(staged, length))
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
    nbytes = sum(part.length for part in chain.slices if chain.regions[part.local].device is not None)
    try:
        buffer = pool.acquire(nbytes, chain.deadline, lambda: chain.done)
        if buffer is None:
            return GONE if chain.done else LATE if pool.clock() >= chain.deadline else SHUTDOWN
        with buffer:
            staged = _StagedChain(chain, buffer)
            if chain.opcode is Opcode.WRITE and not staged.copy(None, into=False):
                return GONE
            outcome = transport.run(staged, path)
            chain.fence = staged.fence
            reads = chain.opcode is Opcode.READ and outcome.status is TransferStatus.COMPLETED
            return GONE if reads and not staged.copy(outcome.refusals, into=True) else outcome
    except DeviceError as error:
        _log.error("a transfer of device memory failed: %s", error)
        return INTERNAL


class _StagedChain(Chain):
    """The substitute for a chain whose local memory is on a device. Who claims it claims the real chain."""

    __slots__ = ("_copies", "_whole")

    def __init__(self, whole: Chain, buffer: StagingBuffer) -> None:
        self._whole = whole
        self._copies = _Copies(buffer)
        slices = list(whole.slices)
        for position, part in enumerate(slices):
            device = whole.regions[part.local].device
            if device is not None:
                place = self._copies.add(position, device, part.local_offset, part.length)
                slices[position] = part._replace(local=buffer.region.key, local_offset=place)
        plan = ChainPlan(whole.remote, whole.opcode, slices, whole.nbytes)
        regions = {**whole.regions, buffer.region.key: buffer.region}
        super().__init__(plan, regions, whole.deadline, lambda chain, outcome: None)
        self.fence, self.checksum = whole.fence, whole.checksum

    def claim(self, abort: Callable[[], None]) -> bool:
        return self._whole.claim(abort)

    def unclaim(self) -> bool:
        return self._whole.unclaim()

    @property
    def stopped(self) -> bool:
        """True once the real chain is stopped or has ended, so that waits on its behalf end too."""
        return self._whole.stopped or self._whole.done

    def copy(self, refusals: bytes | None, *, into: bool) -> bool:
        """Copies slices that are not refused from the device, or ``into`` it; False: stopped. Raises DeviceError."""
        whole = self._whole
        if not whole.claim(lambda: None):
            return False
        try:
            return self._copies.run(lambda: whole.stopped, refusals, into=into)
        finally:
            whole.unclaim()


# --- the serving side ---


class StagedRanges(NamedTuple):
    """A peer's ranges with staged host memory in place of device memory. Their ``buffer`` must be released."""

    buffer: StagingBuffer
    ranges: list[Range]
    found: list[Region | None]
    copies: _Copies

    def land(self) -> None:
        """Copies the payload of a WRITE, which has arrived, into the devices. Raises DeviceError."""
        self.copies.run(_never, into=True)


def stage_ranges(
    pool: StagingPool, opcode: int, ranges: Sequence[Range], found: Sequence[Region | None], deadline: float
) -> StagedRanges | None:
    """Returns host memory to serve a peer's ranges with, filled for a READ; None if no device memory is among them.

    The caller has pinned the regions, and keeps them pinned until it has released the result's buffer. Raises
    DeviceError if copying failed, and Stalled if there was no room until ``deadline``."""
    on_devices = [
        (position, region.device, offset, length)
        for position, ((_, offset, length), region) in enumerate(zip(ranges, found, strict=True))
        if region is not None and region.device is not None
    ]
    if not on_devices:
        return None
    buffer = pool.acquire(sum(length for *_, length in on_devices), deadline, _never)
    if buffer is None:
        raise Stalled
    staged = StagedRanges(buffer, list(ranges), list(found), _Copies(buffer))
    for position, device, offset, length in on_devices:
        place = staged.copies.add(position, device, offset, length)
        staged.ranges[position] = Range(ranges[position][0], place, length)
        staged.found[position] = buffer.region
    try:
        if opcode == Opcode.READ:
            staged.copies.run(_never, into=False)
    except BaseException:
        buffer.release()
        raise
    return staged


def _never() -> bool:
    return False
