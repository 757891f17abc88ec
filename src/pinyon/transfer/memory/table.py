"""Registered memory, shared by all transports: who may touch which bytes, and who is touching them right now.

Whoever moves bytes of a region holds a *pin* on it meanwhile. ``unregister`` refuses new pins at once, waits for the
present ones, and after a grace period aborts their holders; so when it has returned, nothing of ours writes there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from pinyon.core.clock import Clock
from pinyon.transfer.errors import InvalidTransfer, TransferError, TransferLimitReached
from pinyon.transfer.memory.buffers import HOST_PREFIX, open_buffer
from pinyon.transfer.memory.region import Access, DeviceRegion, Region
from pinyon.transfer.memory.staging_pool import Staging
from pinyon.transfer.request import Opcode, Reason
from pinyon.transfer.segment import Range

__all__ = ["MemoryTable"]

STAGING_BYTES = 64 << 20
"""As much as the largest frame has."""


class MemoryTable:
    """Key → region, with pins. All methods are thread-safe."""

    def __init__(self, max_regions: int, staging_bytes: int = STAGING_BYTES, *, clock: Clock = time.monotonic) -> None:
        """``staging_bytes``: of pinned host memory per direction, once memory of a device is registered."""
        self._max_regions = max_regions
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # entered by its lock, which costs a fifth
        self._regions: dict[bytes, Region] = {}
        self.staging = Staging(staging_bytes, self._take_back, clock)
        self.on_unregister: list[Callable[[Region], None]] = []
        """Called when nothing here uses the region any more and before ``unregister`` returns: a transport takes back
        what it gave out for it (a memory registration, a published address). Must not raise."""

    def register(self, buffer: object, location: str | None, access: Access) -> Region:
        """
        Raises:
            InvalidTransfer: not a writable, contiguous, non-empty buffer, or a bad location.
            TransferLimitReached: too many regions.
        """
        opened = open_buffer(buffer)
        kind = Region if opened.device is None else DeviceRegion
        region = kind(opened.view, opened.location if location is None else location, Access(access), opened.device)
        region._owner = opened.owner
        region.descriptor()  # checks the location
        if region.device is not None and region.location.startswith(HOST_PREFIX):
            raise InvalidTransfer(f"the buffer is on {opened.location}", field="location")
        with self._lock:
            if len(self._regions) >= self._max_regions:
                raise TransferLimitReached(f"{self._max_regions} regions are registered")
            if opened.driver is not None:
                self.staging.use(opened.driver)
            self._regions[region.key] = region
        return region

    def _take_back(self, region: Region) -> None:
        for take_back in self.on_unregister:
            take_back(region)

    def unregister(self, region: Region, grace_s: float) -> None:
        """Forget the region. On return nothing of this engine touches its memory any more.

        Operations in flight may finish within ``grace_s`` seconds, then they are aborted, which takes no longer than
        that again. Idempotent.

        Raises:
            TransferError: an operation could not be stopped (a defect): the memory must not be reused.
        """
        with self._lock:
            region.alive = False
            known = self._regions.pop(region.key, None) is not None
            idle = self._wait_unpinned(region, grace_s)
            holders = list(region._holders.values())
        if not idle:
            for abort in holders:
                abort()
            with self._lock:
                idle = self._wait_unpinned(region, max(grace_s, 5.0))
        if known:
            self._take_back(region)
        if not idle:
            raise TransferError("operations on the region do not end; do not reuse its memory")
        if known:
            region.release()
            if region.device is not None:
                self.staging.leave()

    def _wait_unpinned(self, region: Region, timeout_s: float) -> bool:
        deadline = self._clock() + timeout_s
        while region._holders:
            remaining = deadline - self._clock()
            if remaining <= 0:
                return False
            self._changed.wait(remaining)
        return True

    def regions(self) -> list[Region]:
        with self._lock:
            return list(self._regions.values())

    def get(self, key: bytes) -> Region | None:
        return self._regions.get(key)  # a dict read is atomic; a region that dies after it fails to pin

    def pin(self, regions: Iterable[Region], holder: object, abort: Callable[[], None]) -> bool:
        """Hold all of these regions, or none if one is gone. ``abort`` must not block."""
        wanted = tuple(regions)
        with self._lock:
            for region in wanted:
                if not region.alive:
                    return False
            for region in wanted:
                region._holders[holder] = abort
        return True

    def unpin(self, regions: Iterable[Region], holder: object) -> None:
        with self._lock:
            for region in regions:
                region._holders.pop(holder, None)
                if not region.alive:
                    self._changed.notify_all()

    def admit(
        self,
        opcode: int,
        ranges: list[Range],
        holder: object,
        abort: Callable[[], None],
        *,
        host_only: bool = False,
    ) -> tuple[list[Region | None], bytes | None, set[Region]]:
        """Check what a peer asks for, and pin the regions of what is allowed (``host_only``: and in host memory).

        Returns the region per range (None = refused), the refusal codes (None = nothing refused) and the pinned
        regions, which the caller unpins. Nothing is touched before this said yes.
        """
        needed = Access.READ if opcode == Opcode.READ else Access.READ_WRITE
        found: list[Region | None] = []
        codes = bytearray(len(ranges))
        pinned: set[Region] = set()
        with self._lock:
            for position, (key, offset, length) in enumerate(ranges):
                region = self._regions.get(key)
                if region is None:
                    codes[position] = Reason.UNKNOWN_REGION
                elif region.access < needed:
                    codes[position] = Reason.ACCESS_DENIED
                elif offset + length > region.length:
                    codes[position] = Reason.OUT_OF_RANGE
                elif host_only and region.device is not None:
                    codes[position] = Reason.OTHER_TRANSPORT
                else:
                    found.append(region)
                    pinned.add(region)
                    continue
                found.append(None)
            for region in pinned:
                region._holders[holder] = abort
        return found, (bytes(codes) if any(codes) else None), pinned

    # Short ways for one range. What is small is copied under the lock, so it needs no pin.

    def put(self, key: bytes, offset: int, data: memoryview) -> bool:
        """Copy a few KiB from a peer into a region. False: not allowed (``admit`` says why), or not in host memory."""
        with self._lock:
            region = self._regions.get(key)
            end = offset + len(data)
            if region is None or region.access is not Access.READ_WRITE or end > region.length:
                return False
            if region.device is not None:
                return False
            region.view[offset:end] = data
            return True

    def take(self, key: bytes, offset: int, into: memoryview) -> bool:
        """Copy a few KiB of a region for a peer. False: not allowed (``admit`` says why), or not in host memory."""
        with self._lock:
            region = self._regions.get(key)
            end = offset + len(into)
            if region is None or region.access is Access.NONE or end > region.length:
                return False
            if region.device is not None:
                return False
            into[:] = region.view[offset:end]
            return True
