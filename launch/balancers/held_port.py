"""The address at which all processes listen, held by their parent, which accepts no connections."""

from __future__ import annotations

import socket

from pinyon.core.address import parse_address
from pinyon.core.errors import Unavailable


class HeldPort:
    """A port on all addresses of a host. Until ``close`` only this user's ``SO_REUSEPORT`` listeners can use it."""

    def __init__(self, listen: str) -> None:
        """Binds the port; 0 takes a free one. Raises :class:`Unavailable` if anything listens there already."""
        host, port = parse_address(listen)
        self._sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                self._sockets.append(_held(family, str(address[0]), port))
                port = self._sockets[0].getsockname()[1]
        except OSError as error:
            self.close()
            raise Unavailable(f"cannot listen on {listen}: {error.strerror or error}") from None
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()


def _held(family: int, host: str, port: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind((host, port))
        # SO_REUSEPORT is set only after binding: set before, the socket would join others that already listen there
        # with it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # With SO_REUSEADDR, two parents that do not listen could both bind this port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        held.close()
        raise
    return held
