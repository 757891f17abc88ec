"""A client that sends nothing more: is it still there?

TCP says the same of one that has closed its socket and of one that has only shut its sending side. They differ in what
they do with bytes: the closed one's kernel answers with a reset. So something is sent, and the connection looked at.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

__all__ = ["HalfClosed"]

LOOK_S = 0.01
LOOK_MAX_S = 1.0
"""Between two looks, twice as long each time."""
TCP_CLOSE = 7
"""``tcpi_state`` of a connection that was reset (Linux)."""


class HalfClosed:
    """Calls ``gone`` when the connection is known to be dead; ``close`` ends the watch."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, gone: Callable[[], None]) -> None:
        self._loop = loop
        self._socket = transport.get_extra_info("socket")
        self._gone = gone
        self._wait_s = LOOK_S
        self._timer: asyncio.TimerHandle | asyncio.Handle = loop.call_soon(self._look)

    @staticmethod
    def can_tell(transport: asyncio.Transport) -> bool:
        """Not with TLS, where who ends its side has ended the connection; and on TCP only."""
        sock = transport.get_extra_info("socket")
        return (
            sock is not None
            and sock.family in (socket.AF_INET, socket.AF_INET6)
            and transport.get_extra_info("ssl_object") is None
        )

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        try:
            dead = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
        except OSError:
            dead = True
        if dead:
            self._gone()
            return
        self._timer = self._loop.call_later(self._wait_s, self._look)
        self._wait_s = min(2 * self._wait_s, LOOK_MAX_S)
