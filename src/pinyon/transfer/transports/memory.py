"""Registered memory, shared by all transports: who may touch which bytes, and who is touching them right now.

Whoever moves bytes of a region holds a *pin* on it meanwhile. ``unregister`` refuses new pins at once, waits for the
present ones, and after a grace period aborts their holders; so when it has returned, nothing of ours writes there.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from pinyon.transfer.errors import InvalidTransfer, TransferError, TransferLimitReached
from pinyon.transfer.request import Opcode, Reason
from pinyon.transfer.segment import KEY_BYTES, RegionDescriptor
from pinyon.transfer.wire import Descriptor

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Access", "MemoryTable", "Region"]


class Access(IntEnum):
    """What peers that know the region's key may do with it."""

    NONE = 0
    READ = 1
    READ_WRITE = 2


class Region:
    """A registered buffer. Made by ``TransferEngine.register_local_memory``; treat it as read-only."""

    __slots__ = ("_holders", "access", "address", "alive", "array", "key", "length", "location", "view")

    def __init__(self, view: memoryview, location: str, access: Access) -> None:
        self.view = view
        """The buffer as flat bytes."""
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(view, np.uint8)
        """The same memory for numpy, whose copies release the GIL."""
        self.address: int = self.array.ctypes.data
        """Of the first byte, in this process."""
        self.key = secrets.token_bytes(KEY_BYTES)
        self.location = location
        self.length = len(view)
        self.access = access
        self.alive = True
        self._holders: dict[object, Callable[[], None]] = {}

    def descriptor(self) -> RegionDescriptor:
        return RegionDescriptor(self.key, self.location, self.length)

    def __repr__(self) -> str:
        # The key is a capability: never in a log.
        return f"Region({self.location!r}, {self.length} bytes, access={self.access.name}, alive={self.alive})"


class MemoryTable:
    """Key → region, with pins. All methods are thread-safe."""

    def __init__(self, max_regions: int) -> None:
        self._max_regions = max_regions
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # entered by its lock, which costs a fifth
        self._regions: dict[bytes, Region] = {}
        self.on_unregister: list[Callable[[Region], None]] = []
        """Called when nothing here uses the region any more and before ``unregister`` returns: a transport takes back
        what it gave out for it (a memory registration, a published address). Must not raise."""

    def register(self, buffer: Buffer, location: str, access: Access) -> Region:
        """
        Raises:
            InvalidTransfer: not a writable, contiguous, non-empty buffer, or a bad location.
            TransferLimitReached: too many regions.
        """
        try:
            view = memoryview(buffer)
        except TypeError as error:
            raise InvalidTransfer(f"not a buffer: {error}", field="buffer") from None
        if view.readonly:
            raise InvalidTransfer("the buffer is read-only", field="buffer")
        if not view.c_contiguous or not view.nbytes:
            raise InvalidTransfer("the buffer must be C-contiguous and not empty", field="buffer")
        region = Region(view.cast("B"), location, Access(access))
        region.descriptor()  # checks the location
        with self._lock:
            if len(self._regions) >= self._max_regions:
                raise TransferLimitReached(f"{self._max_regions} regions are registered")
            self._regions[region.key] = region
        return region

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
            for take_back in self.on_unregister:
                take_back(region)
        if not idle:
            raise TransferError("operations on the region do not end; do not reuse its memory")

    def _wait_unpinned(self, region: Region, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while region._holders:
            remaining = deadline - time.monotonic()
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
        wanted = list(regions)
        with self._lock:
            if not all(region.alive for region in wanted):
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
        self, opcode: int, ranges: list[Descriptor], holder: object, abort: Callable[[], None]
    ) -> tuple[list[Region | None], bytes | None, set[Region]]:
        """Check what a peer asks for, and pin the regions of what is allowed.

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
                else:
                    found.append(region)
                    pinned.add(region)
                    continue
                found.append(None)
            for region in pinned:
                region._holders[holder] = abort
        return found, (bytes(codes) if any(codes) else None), pinned
