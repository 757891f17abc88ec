"""Ports of this machine that nobody has."""

from __future__ import annotations

import socket

from pinyon.core.errors import InvalidArgument

__all__ = ["is_free", "next_port"]


def next_port(host: str, after: int, taken: set[int]) -> int:
    """The first one after this that is free now and not ``taken``, where it is noted; 0, a free one by the system's
    choice, is followed by 0. Raises :class:`InvalidArgument` if there is none."""
    if not after:
        return 0
    for port in range(after + 1, 1 << 16):
        if port not in taken and is_free(host, port):
            taken.add(port)
            return port
    raise InvalidArgument(f"no port after {after} is free; 0 takes any", field="lbs")


def is_free(host: str, port: int) -> bool:
    """Somebody could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
