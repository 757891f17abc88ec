"""One HTTP/1.1 connection to a server: one request at a time, the next one after the answer.

llhttp (through httptools) parses the answers, strictly. Interim answers (1xx) and trailers are dropped; a body's bytes
are passed on unchanged, without their transfer coding."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from pinyon.frontdoor.answer import Answer
from pinyon.runtime.deadlines import Deadline

HEAD_BYTES_MAX = 64 << 10
"""The maximum size of a head, trailers included."""
HEAD_FIELDS_MAX = 256
INTERIM_MAX = 16
"""The maximum number of interim answers before the final one."""
LENGTH_DIGITS_MAX = 18
KEEPALIVE_S = 15
KEEPALIVE_PROBE_S = 5
KEEPALIVE_PROBES = 3
"""The TCP keep-alive settings, by which a vanished host is detected within half a minute, even during long answers."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a connection, in seconds. An idle connection is kept for ``idle_s``; shorter than the servers' own
    limit, so that these rarely close first. Two pieces of an answer are at most ``stall_s`` apart."""

    connect_s: float = 2.0
    idle_s: float = 4.0
    stall_s: float = 120.0


class UpstreamConnection(asyncio.Protocol):
    """A connection. ``ended`` is called when a request may follow (True), or never will (False)."""

    __slots__ = ("_answer", "_bytes", "_chunked", "_deadline", "_ended", "_fields", "_head_bytes", "_idle_s",
                 "_interim", "_keep", "_length", "_limits", "_loop", "_parser", "_reusable",
                 "_transport")  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        ended: Callable[[UpstreamConnection, bool], None],
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._ended = ended
        self._deadline = Deadline(loop, self._late)
        self._parser = HttpResponseParser(self)
        self._answer: Answer | None = None
        self._transport: asyncio.Transport | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._bytes = self._head_bytes = self._interim = 0
        self._length = -1
        self._chunked = self._keep = False
        self._reusable = True
        self._idle_s = limits.idle_s

    # -- called by the pool

    @property
    def usable(self) -> bool:
        """True if a request may be sent."""
        if not self._reusable or self._answer is not None or self._transport is None:
            return False
        return self._loop.time() < self._deadline.due

    def send(self, head: bytes, body: bytes | bytearray, first_byte_s: float) -> Answer:
        """Sends a request and returns its answer, which must begin within ``first_byte_s``."""
        assert self._transport is not None
        assert self._answer is None
        answer = self._answer = Answer(self)
        self._fields = []
        self._bytes = self._head_bytes = self._interim = 0
        self._deadline.set(self._loop.time() + first_byte_s)
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)
        return answer

    def close(self) -> None:
        """Closes the connection at once; an incomplete answer breaks off."""
        self._reusable = False
        if self._transport is not None:
            self._transport.abort()

    def break_unanswered(self) -> None:
        """Breaks off an answer of which no byte has come."""
        if self._answer is not None and not self._answer.begun:
            self._fail("The server stopped answering.")

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PROBE_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reusable = False
        self._transport = None
        self._deadline.close()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.broke("The server closed the connection before its answer was complete.")
        self._ended(self, False)

    def eof_received(self) -> bool:
        self._reusable = False
        answer = self._answer
        if answer is not None and answer.has_head and self._length < 0 and not self._chunked:
            self._answer = None
            answer.got_all()  # an answer without a length ends this way
            answer.arrived()
        return False

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # no request was sent
            self.close()
            return
        answer.begun = True
        if not answer.has_head:
            self._bytes += len(data)
        self._deadline.set(self._loop.time() + self._limits.stall_s)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):  # no upgrade was requested
            self._fail("The server's answer is not valid HTTP.")
            return
        if self._answer is None:
            self._over()
        elif not answer.has_head:
            if self._bytes > HEAD_BYTES_MAX:
                self._fail("The head of the server's answer is too large.")
            return
        answer.arrived()

    # -- called by httptools

    def on_message_begin(self) -> None:
        if self._answer is None:  # data follows the answer
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if len(self._fields) >= HEAD_FIELDS_MAX or self._head_bytes > HEAD_BYTES_MAX:
            self._fail("The head of the server's answer is too large.")
        elif self._answer is not None and not self._answer.has_head:  # else it is a trailer
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            if status < 100 or status == 101 or self._interim > INTERIM_MAX:
                self._fail("The server's answer is not valid HTTP.")
            return
        self._keep = self._parser.should_keep_alive()
        if self._read_framing(status):
            answer.got_head(status, self._fields, self._length)

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.got(data)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return
        if not answer.has_head:  # an interim answer
            self._fields = []
            return
        self._answer = None
        self._deadline.set(self._loop.time() + self._idle_s)
        self._fields = []
        transport = self._transport
        written = transport is not None and not transport.get_write_buffer_size()
        self._reusable = self._reusable and self._keep and written
        answer.got_all()

    # -- called by the answer

    def pause(self) -> None:
        """Pauses reading and the deadline, since a slow client is no fault of the server."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._deadline.set(inf)

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()
            self._deadline.set(self._loop.time() + self._limits.stall_s)

    def give_up(self, answer: Answer) -> None:
        if answer is self._answer:
            self.close()  # HTTP/1.1 has no other way to cancel

    # -- internals

    def _over(self) -> None:
        """Hands the connection back, or closes it, before the answer's reader runs: the next request may find it."""
        if self._reusable and self._transport is not None:
            if not self._transport.is_reading():
                self._transport.resume_reading()
            self._ended(self, True)
        else:
            self.close()

    def _read_framing(self, status: int) -> bool:
        """Reads how the body ends, and how long the server keeps the connection; returns False if that is invalid."""
        self._length, self._chunked = -1, False
        self._idle_s = self._limits.idle_s
        for name, value in self._fields:
            if name == b"content-length":
                digits = value.strip()
                if not digits.isdigit() or len(digits) > LENGTH_DIGITS_MAX:
                    self._fail("The server's answer is not valid HTTP.")
                    return False
                self._length = int(digits)
            elif name == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    self._fail("The server's answer has a transfer coding that is not understood.")
                    return False
                self._chunked = True
            elif name == b"keep-alive":
                self._idle_s = min(self._idle_s, _idle_s(value))
        if status in (204, 304):
            self._length = 0
        return True

    def _fail(self, message: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.broke(message)
        self.close()

    def _late(self) -> None:
        """Ends an answer that does not come, or a connection that is idle for too long."""
        began = self._answer is not None and self._answer.begun
        self._fail("The server's answer stopped coming." if began else "The server did not answer in time.")


def _idle_s(value: bytes) -> float:
    """Returns the seconds in ``keep-alive: timeout=5, max=100``, less one."""
    for option in value.lower().split(b","):
        name, _, seconds = option.strip().partition(b"=")
        if name == b"timeout" and seconds.isdigit() and len(seconds) < 9:
            return max(0.0, int(seconds) - 1.0)
    return inf
