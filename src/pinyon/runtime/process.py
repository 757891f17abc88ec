"""Settings of the process itself: memory, garbage collection, open files, and the environment of its children."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path

import pinyon

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEEP_BYTES = 64 << 20
MMAP_BYTES = 32 << 20
GC_THRESHOLDS = (10_000, 20, 50)


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
