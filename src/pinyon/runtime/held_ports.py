"""Free ports that stay ours while nobody listens there: before a process starts, and while it is dead."""

from __future__ import annotations

import socket

__all__ = ["HeldPorts"]


class HeldPorts:
    """``take`` → ``close``. Each port is bound by a socket that never listens.

    The system then gives the port to nobody else: not to a server that asks for any port, nor to an outgoing
    connection. A server that asks for this port by number can listen there, again and again.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, host: str) -> int:
        """A free port of ``host``, which is an address or a name of this machine. Raises ``OSError``."""
        address = host.strip("[]")
        held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._sockets.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers that listen there set it as well
        held.bind((address, 0))
        return int(held.getsockname()[1])

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()
