"""The host's resources that this process may use, and an identity that tells which peers are on the same host."""

from __future__ import annotations

import os
import socket

import xxhash


def available_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_id() -> str:
    """Returns an id that is equal for processes that reach each other's abstract Unix sockets.

    They share one running kernel and one network namespace. The id changes with a reboot. Containers of one host have
    each their own, unless they share the namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            kernel = file.read(64)
        space = os.stat("/proc/self/ns/net")
    except OSError:  # no such files: the host's name must do
        return xxhash.xxh3_128_hexdigest(socket.gethostname().encode())
    return xxhash.xxh3_128_hexdigest(kernel + b"%d:%d" % (space.st_dev, space.st_ino))
