"""What this process may use of its host, and which peers are on the same one."""

from __future__ import annotations

import os
import socket

import xxhash


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_id() -> str:
    """The same for processes that reach each other's abstract Unix sockets: one running kernel, one network namespace.

    Changes with a reboot. Containers of one host have each their own, unless they share the namespace.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            kernel = file.read(64)
        space = os.stat("/proc/self/ns/net")
    except OSError:  # no such files: the name has to do
        return xxhash.xxh3_128_hexdigest(socket.gethostname().encode())
    return xxhash.xxh3_128_hexdigest(kernel + b"%d:%d" % (space.st_dev, space.st_ino))
