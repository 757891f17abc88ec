"""The writing half of a connection: one answer after another, no faster than the client reads."""

from __future__ import annotations

import asyncio

from pinyon.core.errors import PinyonError
from pinyon.http.answer import CONTINUE, JSON, STREAM, answer_head
from pinyon.http.request import RequestHead
from pinyon.http.state import HttpState

NO_BODY = (204, 304)
"""Statuses of answers that have neither a body nor a length (RFC 9110 section 6.4.1)."""


class ReplyWriter:
    """A :class:`pinyon.http.answer.Reply`, reset for each request by ``start``."""

    __slots__ = ("_bodiless", "_chunked", "_corked", "_framed", "_loop", "_shared", "_stall", "_transport", "_waiter",
                 "begun", "close", "done", "fields", "paused", "silent")  # fmt: skip

    def __init__(self, shared: HttpState, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._shared = shared
        self._loop = loop
        self._transport = transport
        self._bodiless = False
        self._chunked = self._framed = True
        self._corked = b""
        """The head of an answer, held back until its body begins: one system call instead of two."""
        self._waiter: asyncio.Future[None] | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.fields = b""
        """Header fields of every answer to this request."""
        self.begun = False
        self.done = False
        self.close = False
        """True if the answer is the last one on this connection."""
        self.paused = False
        self.silent = False
        """True once nothing more is written, because another part has sent the last answer."""

    def start(self, head: RequestHead) -> None:
        self._bodiless = head.method == "HEAD"
        self._chunked = not head.old
        self.close = self.close or head.close or self._shared.closing

    def finish(self) -> None:
        self.begun = self.done = self._bodiless = False
        self.fields = b""

    # -- answers

    def whole(self, status: int, body: bytes, content_type: bytes = JSON, fields: bytes = b"") -> None:
        if self.silent or self.begun:
            return
        self.close = self.close or self._shared.closing
        self._bodiless = self._bodiless or status in NO_BODY
        length = STREAM if status in NO_BODY else len(body)
        head = answer_head(
            status, self._shared.date, content_type, length, fields + self.fields, close=self.close, chunked=False
        )  # fmt: skip
        self.begun = self.done = True
        self._transport.write(head if self._bodiless else head + body)

    def error(self, error: PinyonError) -> int:
        """Answers with an error and returns its status."""
        status, body, fields = self._shared.app.refusal(error, named=bool(self.fields))
        self.whole(status, body, JSON, fields)
        return status

    def interim(self) -> bool:
        """Sends an interim answer (100 Continue); returns False for an HTTP/1.0 client, which knows none."""
        if self._chunked:
            self._transport.write(CONTINUE)
        return self._chunked

    def begin(self, content_type: bytes, fields: bytes = b"", status: int = 200, length: int = STREAM) -> None:
        self.begun = True
        self.close = self.close or self._shared.closing
        if status in NO_BODY:
            self._bodiless, length = True, STREAM
        self._framed = self._chunked and length == STREAM and not self._bodiless
        self._corked = answer_head(
            status, self._shared.date, content_type, length, fields + self.fields, close=self.close,
            chunked=self._framed,
        )  # fmt: skip

    async def send(self, data: bytes) -> None:
        if self.paused:
            await self._writable()
        self.push(data)

    def push(self, data: bytes) -> bool:
        if self.silent:
            return True  # the answer is not read any more
        if self.paused:
            return False
        if self._bodiless:
            return True
        head, self._corked = self._corked, b""
        self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._framed else head + data)
        return True

    async def end(self, data: bytes) -> None:
        if self.paused:
            await self._writable()
        if not self.silent:
            head, self._corked = self._corked, b""
            self.done = True
            if self._bodiless:
                self._transport.write(head)
            elif not self._framed:
                self._transport.write(head + data)
            elif data:
                self._transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(data), data))
            else:
                self._transport.write(head + b"0\r\n\r\n")

    # -- slow readers

    async def _writable(self) -> None:
        while self.paused and not self.silent:
            self._waiter = self._loop.create_future()
            await self._waiter

    def pause(self) -> None:
        self.paused = True
        if self._stall is None:
            self._stall = self._loop.call_later(self._shared.limits.write_stall_s, self._transport.abort)

    def resume(self) -> None:
        self.paused = False
        self.end_timers()
        self._wake()

    def silence(self) -> None:
        """Stops all writing for good."""
        self.silent = True
        self._wake()

    def end_timers(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None
