"""Settings of the process itself: memory, garbage collection, open files, and the environment of its children."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
from pathlib import Path

import pinyon

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEEP_BYTES = 64 << 20
MMAP_BYTES = 32 << 20
GC_THRESHOLDS = (10_000, 20, 50)
HUGE_PAGE_BYTES = 2 << 20


def spare_collector() -> None:
    """Lets garbage collection run less; call it before the imports.

    Nearly all objects that imports make stay, and searching them was a tenth of the start-up."""
    gc.set_threshold(10 * GC_THRESHOLDS[0], *GC_THRESHOLDS[1:])


def tune_process() -> None:
    """Tunes memory, garbage collection and open files; call it once, when everything is built."""
    _keep_freed_memory()
    # The objects that exist now stay, so the collector need not search them again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    # Each connection needs a descriptor, and the usual soft limit is 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def child_environment(root: Path, parent_pid: int) -> dict[str, str]:
    """Returns the environment of a process that ends with its parent and finds the packages of this one.

    They are compiled if this process's are. Packages that are not beside ``pinyon`` are found below ``root``."""
    source = Path(pinyon.__file__).resolve().parent.parent
    return {
        **os.environ,
        "PINYON_PARENT_PID": str(parent_pid),
        "PYTHONSAFEPATH": "1",  # no modules from the working folder, which is anybody's
        "PYTHONPATH": os.pathsep.join(filter(None, (str(source), str(root), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }


def _keep_freed_memory() -> bool:
    """Keeps up to 64 MiB of freed memory for the next message. Returns False if the C library has no ``mallopt``.

    glibc returns freed memory to the kernel as soon as 128 KiB of it lie at the heap's end. It takes blocks of that
    size from the kernel one by one. A prompt of 32 KB is a message of 140 KiB: serialising one cost 250 µs of page
    faults, and costs 20 µs with this."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES))


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Asks for pages of 2 MiB in this memory, as far as whole ones fit (``madvise(2)``, MADV_HUGEPAGE).

    This is for a table that is read all over. The processor remembers the addresses of some thousand small pages;
    reading from other pages takes three times as long. Pages that are never touched cost nothing, as before. Where the
    system has no huge pages, nothing happens."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole = (address + nbytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if advice is None or whole <= 0:
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), ctypes.c_int(advice))
