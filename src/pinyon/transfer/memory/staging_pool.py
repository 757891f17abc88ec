"""Pinned host memory that device memory is copied through, where a transport does not reach the device itself."""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable

from pinyon.core.clock import Clock
from pinyon.transfer.memory.device import DeviceDriver, DeviceError
from pinyon.transfer.memory.region import Access, Region

_log = logging.getLogger(__name__)
_PAGE = 4096
_LOOK_S = 0.25
"""Time within which a thread that waits for room notices that it need not any more."""


class StagingBuffer:
    """A contiguous part of a pool, from ``start`` on; :meth:`release` it, or use it as a context."""

    def __init__(self, pool: StagingPool, region: Region, start: int, size: int) -> None:
        self.region = region
        """The whole pool, as registered host memory that no peer can reach."""
        self.start = start
        self._size = size
        self._pool: StagingPool | None = pool

    def view(self, offset: int, length: int) -> memoryview:
        """Returns bytes of the pool; ``offset`` is counted from its beginning."""
        return self.region.view[offset : offset + length]

    def release(self) -> None:
        """Gives the part back to the pool. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._put_back(self.start, self._size)

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StagingPool:
    """Host memory of a fixed size, pinned for the devices, lent in contiguous parts, first come first served.

    It is in use as long as memory of a device is registered: allocated when first needed, freed when it is closed
    and all parts are back. A call of ``use`` opens it again."""

    def __init__(self, total_bytes: int, forget: Callable[[Region], None], clock: Clock) -> None:
        """Creates a pool that calls ``forget`` before its memory is freed, so that NICs let go of it."""
        self.total_bytes = -(-total_bytes // _PAGE) * _PAGE
        self.clock = clock
        self.regions = 0
        """Number of regions on devices that are registered now."""
        self._forget = forget
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._pages = bytearray(self.total_bytes // _PAGE)
        """State of each page: 1 if it is lent."""
        self._lent = 0
        self._closed = False
        self._region: Region | None = None
        self._drivers: list[DeviceDriver] = []
        self._unpin: list[Callable[[], None]] = []

    def use(self, driver: DeviceDriver) -> None:
        """Pins the memory for a driver's devices too, because a region on one of them is registered."""
        with self._changed:
            self.regions += 1
            self._closed = False
            if driver not in self._drivers:
                self._drivers.append(driver)
                if self._region is not None:
                    self._pin(self._region, driver)

    def leave(self) -> None:
        """Notes that such a region is unregistered, and closes the pool after the last one."""
        with self._changed:
            self.regions -= 1
            if not self.regions:
                self.close()

    def acquire(self, nbytes: int, deadline: float, given_up: Callable[[], bool]) -> StagingBuffer | None:
        """Waits for room; returns None if there is none by ``deadline``, the pool is closed, or ``given_up()`` says so.

        Raises DeviceError if so much never fits, or the host has no memory."""
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
                    remaining = deadline - self.clock()
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
        for driver in self._drivers:
            self._pin(region, driver)
        return region

    def _pin(self, region: Region, driver: DeviceDriver) -> None:
        try:
            self._unpin.append(driver.pin(region.view))
        except DeviceError as error:
            _log.warning("staging memory is not pinned, copies are slower: %s", error)

    def _take(self, size: int) -> int | None:
        """Takes the first run of free pages that fits; returns its start in bytes, or None."""
        count = size // _PAGE
        first = self._pages.find(bytes(count))
        if first < 0:
            return None
        self._pages[first : first + count] = b"\1" * count
        return first * _PAGE

    def _put_back(self, start: int, size: int) -> None:
        with self._changed:
            self._pages[start // _PAGE : (start + size) // _PAGE] = bytes(size // _PAGE)
            self._lent -= 1
            self._changed.notify_all()
            self._free_if_done()

    def close(self) -> None:
        """Stops lending; the memory is freed when all parts are back."""
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
        self._drivers.clear()
        region.release()
