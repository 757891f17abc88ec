"""A connection on a socket of the event loop: bytes, pings, and the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from pinyon.runtime.http2.connection import Http2Connection
from pinyon.runtime.http2.wire import ConnectionFailed

TICK_S = 0.25
PING_TICKS = 1
"""The ticks of silence after which the peer is pinged."""
DEAD_TICKS = 5
"""The ticks of silence after which the peer is gone: 1.25 to 1.5 s, as in gRPC's connections between services."""
EXCUSED = 2
"""Late ticks in a row that do not count as silence: this process may have stalled, with the peer's data unread."""
PIECE_BYTES = 64 << 10
"""The bytes that are handled in one turn of the loop, as they may be thousands of messages."""
UNREAD_BYTES = 8 << 20
"""Bytes that a peer may leave unread before it counts as gone: a message has 4 MiB at most, and all but one wait."""

_log = logging.getLogger("pinyon.http2")


@contextmanager
def together(connection: Http2Connection) -> Iterator[None]:
    """Sends all that is written within at once: each write is a system call, and wakes the peer. Nothing may wait."""
    write, parts = connection.write, list[bytes]()
    connection.write = parts.append
    try:
        yield
    finally:
        connection.write = write
        write(b"".join(parts))


class Http2Protocol(asyncio.Protocol):
    """The protocol of one socket; ``make`` makes its connection, given the function that writes to the peer."""

    connection: Http2Connection

    def __init__(
        self,
        make: Callable[[Callable[[bytes], None]], Http2Connection],
        changed: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Calls ``changed`` after received data has been handled, and ``lost`` once, when the connection is gone."""
        self._make = make
        self._changed = changed
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._silent = 0
        """The ticks since data last came."""
        self._asked = False
        """True if the peer has been pinged since then."""
        self._excused = 0
        self._next_s = 0.0
        self._tick: asyncio.TimerHandle | None = None
        self._gone = ""
        self.made = False
        """True once there is, or was, a connection."""
        self.paused = False
        """True while the peer reads more slowly than this process writes."""
        self.writers: set[asyncio.Future[None]] = set()
        """The futures of writers that wait for the peer."""

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.connection = self._make(self.transport.write)
        self.made = True
        self.transport.write(self.connection.opening)
        self._set_tick()

    def data_received(self, data: bytes) -> None:
        self._silent = self._excused = 0
        self._asked = False
        if self._gone:
            return
        try:
            self.connection.receive(data[:PIECE_BYTES])
        except ConnectionFailed as error:
            self.connection.leave(error.code, error.reason)
            _log.info("a connection ends: %s", error.reason, extra={"peer": self.transport.get_extra_info("peername")})
            self.close(error.reason)
        self._changed()
        if len(data) > PIECE_BYTES and not self._gone and not self.transport.is_closing():
            self.transport.pause_reading()
            self._loop.call_soon(self._go_on, data[PIECE_BYTES:])

    def _go_on(self, data: bytes) -> None:
        """Goes on with the rest of the data."""
        if not self._gone and not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(data)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        for each in self.writers:
            if not each.done():
                each.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(self._gone or "the connection broke")
        if self._tick is not None:
            self._tick.cancel()
        self._lost()

    # -- its end

    def close(self, reason: str = "closed") -> None:
        """Closes the connection after all was written, for which a peer that reads nothing does not get long."""
        self._over(reason)
        if not self.transport.is_closing():  # if closed twice, asyncio's TLS forgets the connection to abort
            self.transport.close()

    def heard_by_nobody(self) -> None:
        """Stops calling ``changed`` and ``lost``."""
        self._changed = self._lost = lambda: None

    def abort(self, reason: str) -> None:
        self._over(reason)
        self.transport.abort()

    def _over(self, reason: str) -> None:
        if not self._gone:
            self._gone = reason
            self.connection.write = _nowhere
            self.connection.lost(reason)

    # -- whether the peer is there

    @property
    def dead_ticks(self) -> int:
        """The ticks of silence after which the peer is gone."""
        return DEAD_TICKS

    def _set_tick(self) -> None:
        self._next_s = self._loop.time() + TICK_S
        self._tick = self._loop.call_at(self._next_s, self._look)

    def _look(self) -> None:
        late_s = self._loop.time() - self._next_s
        self._set_tick()
        self.connection.tick()
        if self.transport.get_write_buffer_size() > UNREAD_BYTES:
            self.abort("the peer reads too slowly")
            return
        if late_s > TICK_S and self._excused < EXCUSED:
            self._excused += 1
            return
        self._silent += 1 + int(late_s / TICK_S)
        if self._silent > (DEAD_TICKS if self._gone else self.dead_ticks) and (self._asked or self._gone):
            self.abort("the peer is silent")
        elif self._silent > PING_TICKS and not self._asked and not self._gone:
            self._asked = True
            self.connection.ping()


def _nowhere(_: bytes) -> None:
    """Drops bytes that are written after the end."""
