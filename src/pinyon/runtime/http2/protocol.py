"""A connection on a socket of the event loop: bytes, pings, and the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from pinyon.runtime.http2.connection import Connection
from pinyon.runtime.http2.wire import ConnectionFailed

TICK_S = 0.25
PING_TICKS = 1
"""After so long a silence the peer is asked whether it is there."""
DEAD_TICKS = 5
"""After so long a silence it is gone: 1.25 to 1.5 s, as gRPC's connections between services have it."""
EXCUSED = 2
"""Times in a row that it may have been us who were away: what the peer said meanwhile is about to be read."""
PIECE_BYTES = 64 << 10
"""So much of what was read is dealt with in one turn of the loop: it may be thousands of messages."""
UNREAD_BYTES = 8 << 20
"""A peer that lets so much lie is gone, too: it takes messages of 4 MiB, and all but one wait for their turn."""

_log = logging.getLogger("pinyon.http2")


class Http2Protocol(asyncio.Protocol):
    """``make`` gives the connection for what writes to the peer; ``lost`` is told of the end, once."""

    connection: Connection

    def __init__(
        self,
        make: Callable[[Callable[[bytes], None]], Connection],
        changed: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """``changed`` is called after whatever came has been dealt with, ``lost`` when the connection is gone."""
        self._make = make
        self._changed = changed
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._silent = 0
        """Ticks since something came."""
        self._asked = False
        """Since then."""
        self._excused = 0
        self._next_s = 0.0
        self._tick: asyncio.TimerHandle | None = None
        self._gone = ""
        self.made = False
        """There is, or was, a connection."""
        self.paused = False
        """The peer reads more slowly than is written."""
        self.writers: set[asyncio.Future[None]] = set()
        """Who waits for it."""

    # -- what asyncio calls

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
        """With the rest of what was read."""
        if not self._gone and not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(data)

    def eof_received(self) -> bool:
        return False

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
        """After what was written, which a peer that reads nothing does not keep for long."""
        self._over(reason)
        if not self.transport.is_closing():  # closed twice, asyncio's TLS forgets what it would have to abort
            self.transport.close()

    def heard_by_nobody(self) -> None:
        """Whoever was told of what happens here is not told any more."""
        self._changed = self._lost = _nothing

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
        """Ticks of silence after which the peer is gone."""
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


def _nothing() -> None:
    pass


def _nowhere(_: bytes) -> None:
    """What is written after the end."""
