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
import mmap
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from pinyon.transfer.links.stream import Stalled
from pinyon.transfer.memory.device import DeviceDriver, DeviceError, DeviceMemory
from pinyon.transfer.memory.table import Access, Region
from pinyon.transfer.paths.reach import Path
from pinyon.transfer.request import Opcode, Reason, TransferStatus
from pinyon.transfer.slicing import ChainPlan, Slice
from pinyon.transfer.transports.base import SHUTDOWN, Chain, Outcome, Transport
from pinyon.transfer.transports.tcp.wire import Descriptor

__all__ = ["Staging", "StagingBuffer", "StagingPool", "needs_staging", "run_staged", "stage_ranges"]

_log = logging.getLogger(__name__)
_PIECE_BYTES = 8 << 20
"""Most of a chain that is staged at a time: a whole one, with the usual limits."""
_PIECES = 4
"""A pool has room for at least so many pieces."""
_PAGE = 4096
_LOOK_S = 0.25
"""Who waits for room notices within this time that it need not any more."""
_CANCELLED = Outcome(TransferStatus.CANCELLED, Reason.CANCELLED)
_LATE = Outcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
_INTERNAL = Outcome(TransferStatus.FAILED, Reason.INTERNAL)


class StagingBuffer:
    """A contiguous part of a pool, from ``start`` on; :meth:`release` it, or use it as a context."""

    def __init__(self, pool: StagingPool, region: Region, start: int, size: int) -> None:
        self.region = region
        """All of the pool, as registered host memory that no peer can reach."""
        self.start = start
        self._size = size
        self._pool: StagingPool | None = pool

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes of the pool, ``offset`` counted from its beginning."""
        return self.region.view[offset : offset + length]

    def release(self) -> None:
        """Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._put_back(self.start, self._size)

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class StagingPool:
    """Host memory of a fixed size, pinned for the devices, lent in contiguous parts, first come first served.

    Allocated when it is first needed, freed when it is closed and everything is back.
    """

    def __init__(self, total_bytes: int, forget: Callable[[Region], None]) -> None:
        """``forget``: called before the memory is freed, so that NICs let go of it."""
        self.total_bytes = -(-total_bytes // _PAGE) * _PAGE
        self._forget = forget
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._free: list[tuple[int, int]] = []
        """``(start, size)``, sorted, no two adjacent."""
        self._lent = 0
        self._closed = False
        self._region: Region | None = None
        self._drivers: list[DeviceDriver] = []
        self._unpin: list[Callable[[], None]] = []

    @property
    def piece_bytes(self) -> int:
        return min(_PIECE_BYTES, max(_PAGE, self.total_bytes // _PIECES // _PAGE * _PAGE))

    def use(self, driver: DeviceDriver) -> None:
        """Pin the memory for the devices of this driver too."""
        with self._changed:
            if driver not in self._drivers:
                self._drivers.append(driver)
                if self._region is not None:
                    self._pin(self._region, driver)

    def acquire(self, nbytes: int, deadline: float, given_up: Callable[[], bool]) -> StagingBuffer | None:
        """Wait for room; None when there is none by ``deadline``, the pool is closed, or ``given_up()`` says so.

        Raises:
            DeviceError: so much never fits, or the host has no memory.
        """
        size = -(-nbytes // _PAGE) * _PAGE
        if size > self.total_bytes:
            raise DeviceError(f"{nbytes} bytes do not fit into a staging pool of {self.total_bytes}")
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while not self._closed and not given_up():
                    if self._queue[0] is ticket:
                        region = self._region or self._allocate()
                        start = self._take(size)
                        if start is not None:
                            self._lent += 1
                            return StagingBuffer(self, region, start, size)
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        break
                    self._changed.wait(min(remaining, _LOOK_S))
                return None
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _allocate(self) -> Region:
        try:
            memory = memoryview(mmap.mmap(-1, self.total_bytes))
        except OSError as error:
            raise DeviceError(f"no {self.total_bytes} bytes of staging memory: {error}") from None
        region = self._region = Region(memory, "cpu:0", Access.NONE)
        self._free = [(0, self.total_bytes)]
        for driver in self._drivers:
            self._pin(region, driver)
        return region

    def _pin(self, region: Region, driver: DeviceDriver) -> None:
        try:
            self._unpin.append(driver.pin(region.view))
        except DeviceError as error:
            _log.warning("staging memory is not pinned, copies are slower: %s", error)

    def _take(self, size: int) -> int | None:
        """First fit."""
        for position, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[position : position + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def _put_back(self, start: int, size: int) -> None:
        with self._changed:
            at = bisect(self._free, (start, size))
            if at < len(self._free) and start + size == self._free[at][0]:
                size += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == start:
                at -= 1
                start, before = self._free.pop(at)
                size += before
            self._free.insert(at, (start, size))
            self._lent -= 1
            self._changed.notify_all()
            self._free_if_done()

    def close(self) -> None:
        """Lend nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._free_if_done()

    def _free_if_done(self) -> None:
        region = self._region
        if not self._closed or self._lent or region is None:
            return
        self._region = None
        region.alive = False
        self._forget(region)
        for unpin in self._unpin:
            try:
                unpin()
            except DeviceError:
                _log.warning("staging memory cannot be unpinned", exc_info=True)
        self._unpin.clear()
        region.release()


class Staging:
    """An engine's pools."""

    def __init__(self, total_bytes: int, forget: Callable[[Region], None]) -> None:
        """``total_bytes`` each."""
        self.outbound = StagingPool(total_bytes, forget)
        """For chains of ours."""
        self.inbound = StagingPool(total_bytes, forget)
        """For what peers ask for."""

    def use(self, driver: DeviceDriver) -> None:
        for pool in (self.outbound, self.inbound):
            pool.use(driver)

    def close(self) -> None:
        for pool in (self.outbound, self.inbound):
            pool.close()


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

    def out(self, buffer: StagingBuffer, stopped: Callable[[], bool]) -> bool:
        """Device to host. False: stopped.

        Raises:
            DeviceError
        """
        for device, offset, staged, length in self.list:
            if stopped():
                return False
            device.copy_out(offset, buffer.view(staged, length))
        return True

    def into(self, buffer: StagingBuffer, stopped: Callable[[], bool]) -> bool:
        """Host to device. False: stopped.

        Raises:
            DeviceError
        """
        for device, offset, staged, length in self.list:
            if stopped():
                return False
            device.copy_in(offset, buffer.view(staged, length))
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


def run_staged(transport: Transport, chain: Chain, path: Path) -> Outcome:
    """``transport.run`` for a chain that needs staging. Same contract."""
    pool = next(staging.outbound for part in chain.slices if (staging := chain.regions[part.local].staging) is not None)
    refusals = bytearray(len(chain.slices))
    for positions, parts, nbytes in _pieces(chain, pool.piece_bytes):
        try:
            buffer = pool.acquire(nbytes, chain.deadline, lambda: chain.done) if nbytes else None
        except DeviceError as error:
            _log.error("a transfer of device memory failed: %s", error)
            return _INTERNAL
        if nbytes and buffer is None:
            return _CANCELLED if chain.done else _LATE if time.monotonic() >= chain.deadline else SHUTDOWN
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
    staged = _StagedChain(chain, parts, buffer)
    try:
        outcome = transport.run(staged, path)
        chain.fence = staged.fence
        if staged.failed:
            return _INTERNAL
        if outcome.status is TransferStatus.COMPLETED and chain.opcode is Opcode.READ:
            return outcome if staged.land(outcome.refusals) else _CANCELLED
    except DeviceError as error:
        _log.error("copying to a device failed: %s", error)
        outcome = _INTERNAL
    finally:
        stopped = staged.claimed and not chain.unclaim()
    return _CANCELLED if stopped else outcome


class _StagedChain(Chain):
    """What a transport sees of a chain, or a piece of it, whose local memory is on a device.

    From the transport's claim until the copies back have ended the real chain is claimed: it may end only then. Only
    while the transport itself holds the claim may its endpoint be aborted for it.
    """

    __slots__ = ("_buffer", "_parts", "_whole", "claimed", "failed")

    def __init__(self, whole: Chain, parts: list[Slice], buffer: StagingBuffer | None) -> None:
        self._whole = whole
        self._parts = parts
        self._buffer = buffer
        self.claimed = False
        """The real chain is, through us."""
        self.failed = False
        """The device did not give its bytes."""
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
        super().__init__(plan, regions, whole.deadline, _ignore)
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
        """Somebody ended the real chain, so whoever waits on its behalf may stop."""
        return self._whole.done

    @done.setter
    def done(self, value: bool) -> None:
        return  # the base class starts with False, which the real chain says itself

    def claim(self, abort: Callable[[], None]) -> bool:
        """Claim the real chain and stage what is to be WRITTEN."""
        if not self._whole.claim(_nothing):
            return False
        again, self.claimed = self.claimed, True
        if self.opcode is Opcode.WRITE and self._buffer is not None and not again:
            try:
                if not self._copies(None).out(self._buffer, self._stopped):
                    return False
            except DeviceError as error:
                _log.error("copying from a device failed: %s", error)
                self.failed = True
                return False
        # An endpoint must not be aborted for a chain that does not run on it, so it is named only now.
        self._whole.claim(abort)
        if self._whole.stopped:
            abort()  # in case that came before the line above
        return True

    def unclaim(self) -> bool:
        """The transport is out of it; the real chain stays claimed."""
        self._whole.claim(_nothing)
        return not self._whole.stopped

    def land(self, refusals: bytes | None) -> bool:
        """Copy what was READ to the device, without the refused slices. False: the chain was stopped.

        Raises:
            DeviceError
        """
        return self._buffer is None or self._copies(refusals).into(self._buffer, self._stopped)


def _nothing() -> None:
    return


def _ignore(chain: Chain, outcome: Outcome) -> None:
    return


# --- the serving side ---


class StagedRanges:
    """Ranges that a peer asked for, with staged host memory in the place of device memory. Release it."""

    def __init__(self, ranges: Sequence[Descriptor], found: Sequence[Region | None], buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self._copies = _Copies()
        self.ranges: list[Descriptor] = []
        self.found: list[Region | None] = []
        at = buffer.start
        for one, region in zip(ranges, found, strict=True):
            if region is None or region.device is None:
                self.ranges.append(one)
                self.found.append(region)
                continue
            key, offset, length = one
            self._copies.add(region.device, offset, at, length)
            self.ranges.append(Descriptor(key, at, length))
            self.found.append(buffer.region)
            at += length

    def load(self) -> None:
        """For a READ: out of the devices.

        Raises:
            DeviceError
        """
        self._copies.out(self._buffer, _never)

    def land(self) -> None:
        """For a WRITE that has arrived: into the devices.

        Raises:
            DeviceError
        """
        self._copies.into(self._buffer, _never)

    def release(self) -> None:
        self._buffer.release()


def stage_ranges(
    opcode: int, ranges: Sequence[Descriptor], found: Sequence[Region | None], deadline: float
) -> StagedRanges | None:
    """Host memory to serve a peer's ranges with, filled if it is for a READ; None when no device is among them.

    The regions are pinned by the caller, and stay so until it has released this.

    Raises:
        DeviceError: copying failed.
        Stalled: there was no room for too long.
    """
    nbytes = 0
    pool: StagingPool | None = None
    for (_, _, length), region in zip(ranges, found, strict=True):
        if region is not None and region.staging is not None:
            pool = region.staging.inbound
            nbytes += length
    if pool is None:
        return None
    buffer = pool.acquire(nbytes, deadline, _never)
    if buffer is None:
        raise Stalled
    try:
        staged = StagedRanges(ranges, found, buffer)
        if opcode == Opcode.READ:
            staged.load()
    except BaseException:
        buffer.release()
        raise
    return staged


def _never() -> bool:
    return False
