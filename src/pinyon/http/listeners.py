"""The sockets on which an HTTP server listens.

They are the server's own, and what accepts from them has a copy: when it has stopped, the connections that the kernel
had made by then are still here and can be taken. Without that, closing would reset them, and a client that came in time
could not know whether its request was served.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

BACKLOG = 2048


class Listeners:
    """``open`` → ``waiting`` → ``close``."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    async def open(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen on all addresses of the host; the port. With ``reuse_port`` other processes may, too. Raises
        :class:`OSError`, and then holds nothing."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                bound = socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=reuse_port)
                self.sockets.append(bound)
                bound.setblocking(False)
        except OSError:
            self.close()
            raise
        return int(self.sockets[0].getsockname()[1])

    def waiting(self) -> list[tuple[socket.socket, str]]:
        """What has connected and was not accepted, with the client's host: at most a backlog of each socket."""
        clients = []
        for bound in self.sockets:
            with suppress(OSError):  # BlockingIOError: that was the last; or no descriptors are left
                for _ in range(BACKLOG):
                    client, address = bound.accept()
                    client.setblocking(False)
                    clients.append((client, str(address[0])))
        return clients

    def close(self) -> None:
        """Refuse connections from now on."""
        for bound in self.sockets:
            bound.close()
        self.sockets.clear()
