"""Memory by the GiB: in large pages, and there before it is used."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

from pinyon.runtime.logging import get_logger

HUGE_PAGE_BYTES = 2 << 20
LOOK_BYTES = 256 << 20
"""The bytes after which the memory left is looked at again."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""A container's limit of memory and what is in use, with control groups of version 2 and 1."""

_log = get_logger("memory")


class BigMemory:
    """Zeroed memory of this process, in large pages where the system has them.

    A thread asks the kernel for the pages from the start on, if that much memory is left. Else each first write waits
    for its page, which takes twice as long as the write.

    Raises:
        OSError: There is no such address space."""

    def __init__(self, nbytes: int) -> None:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(mapped)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        prefer_huge_pages(self._address, nbytes)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._populate, name="pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. The memory stays until nothing uses it any more."""
        self._closed.set()
        self._thread.join()

    def _populate(self) -> None:
        nbytes = self.view.nbytes
        madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
        for first in range(0, nbytes, HUGE_PAGE_BYTES):
            if self._closed.is_set() or madvise is None:
                return
            # Others take memory meanwhile.
            if not first % LOOK_BYTES and (left := memory_left()) is not None and left < nbytes - first:
                _log.warning(
                    "%d MiB are still to be used, and %d MiB are left: the system may end processes when they fill",
                    (nbytes - first) >> 20,
                    left >> 20,
                )
                return
            place, size = ctypes.c_void_p(self._address + first), min(HUGE_PAGE_BYTES, nbytes - first)
            if madvise(place, ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE)):
                if (code := ctypes.get_errno()) != errno.EINVAL:  # which an older kernel says
                    _log.warning("%d of %d MiB are there: %s", first >> 20, nbytes >> 20, os.strerror(code))
                return


def memory_left() -> int | None:
    """Returns the bytes that the machine and the container of this process have left; None if nothing tells."""
    left = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            left.append(int(limit.read_text()) - int(used.read_text()) + _cached(used.with_name("memory.stat")))
    return min(left, default=None)


def _cached(stat: Path) -> int:
    """Returns the bytes in use that only cache files, which the kernel gives back."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (line.split() for line in stat.read_text().splitlines())
        return next(int(number) for name, number in lines if name == "inactive_file")
    return 0


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Asks for pages of 2 MiB in this memory, as far as whole ones fit (``madvise(2)``, MADV_HUGEPAGE).

    This is for memory that is read all over. The processor remembers the addresses of some thousand small pages;
    reading from other pages takes three times as long. Pages that are never touched cost nothing, as before. Where the
    system has no huge pages, nothing happens."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole = (address + nbytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if advice is None or whole <= 0:
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), ctypes.c_int(advice))
