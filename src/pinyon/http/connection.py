"""One HTTP/1.1 connection: request by request, one answer at a time.

While a request is answered, reading goes on, for a socket that nobody reads does not tell that its client has left.
What comes behind the request is kept as bytes; if it is too much, it is dropped, and the answer is the last one. A
client that is gone cancels its request; one that will only send nothing more gets its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from math import inf
from typing import cast

from pinyon.core.errors import PinyonError, Unavailable
from pinyon.http.answer import CONTINUE
from pinyon.http.budget import Share
from pinyon.http.error import HttpError
from pinyon.http.reader import RequestReader
from pinyon.http.request import RequestHead
from pinyon.http.state import Exchange, HttpState
from pinyon.http.visitor import Visitor
from pinyon.http.writer import ReplyWriter
from pinyon.runtime.deadlines import Deadline

READ_AHEAD_BYTES = 1 << 20
"""What is kept of pipelined requests."""
DISCARD_BYTES = 64 << 10
"""A refused body up to this size is read to its end, and the connection lives on."""
DROPPED_BYTES = 16 << 20
"""Of what follows a last request. It is read, for who still sends would see a reset in place of the answer."""
LINGER_S = 2.0
"""How long that goes on when a client was refused."""
LINGERING_MAX = 256
FIRST_S = 3.0
"""A connection that has brought no request yet gets this long when the server ends: one may be under way."""
TURN_REQUESTS = 16
"""Answered in one go; then it is the others' turn."""


class State(IntEnum):
    """Where a connection is in the exchange of requests and answers."""

    HEAD = 0  # of the next request
    BODY = 1
    ANSWER = 2
    DISCARD = 3  # the body of a request that has its answer
    LINGER = 4  # whatever comes
    CLOSED = 5


_AT_WORK = (State.HEAD, State.BODY, State.DISCARD)


class Connection(asyncio.Protocol):
    """Made for each connection by the server, which calls ``shutdown`` and ``end``."""

    __slots__ = (
        "_admitted",
        "_arrived",
        "_deadline",
        "_dropped",
        "_exchange",
        "_lingers",
        "_loop",
        "_paused",
        "_read_ahead",
        "_reader",
        "_running_bytes",
        "_share",
        "_shared",
        "_since",
        "_state",
        "_task",
        "_transport",
        "_used",
        "_visitor",
        "_writer",
    )  # fmt: skip

    def __init__(
        self, shared: HttpState, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None] | None = None
    ) -> None:
        """``arrived`` is called when it begins to count for itself."""
        self._shared = shared
        self._arrived = arrived
        self._loop = loop
        self._reader = RequestReader(shared.limits)
        self._read_ahead = max(READ_AHEAD_BYTES, shared.limits.head_bytes)  # a head that is not all here is unread
        self._state = State.HEAD
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._admitted = self._lingers = self._paused = self._used = False
        self._share = Share(shared.budget)
        self._running_bytes = 0
        """Body of the request that is being answered."""
        self._dropped = 0
        self._since = 0.0
        """When the request that is arriving began; 0: none is."""
        self._deadline = Deadline(loop, self._late)

    # -- life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        shared = self._shared
        self._transport = cast("asyncio.Transport", transport)
        self._writer = ReplyWriter(shared, self._loop, self._transport)
        self._visitor = Visitor(shared, transport)
        shared.connections.add(self)
        shared.gauge.inc()
        if self._arrived is not None:
            self._arrived()
        try:
            if shared.admitted >= shared.limits.connections:
                raise HttpError(503, "Too many connections.", retry_after_s=1.0)
            self._visitor.arrive()
        except HttpError as error:
            self._refuse(error)
            return
        shared.admitted += 1
        self._admitted = True
        self._deadline.set(self._loop.time() + shared.limits.arrival_s)

    def connection_lost(self, exc: Exception | None) -> None:
        shared = self._shared
        self._state = State.CLOSED
        shared.connections.discard(self)
        if shared.emptied is not None and not shared.connections:
            shared.emptied.set()
        shared.gauge.dec()
        shared.admitted -= self._admitted
        shared.lingering -= self._lingers
        self._visitor.leave()
        self._writer.end_timers()
        self._writer.silence()
        self._deadline.close()
        self._reader.drop()
        self._reader.discard()
        self._charge()
        self._cancel()

    def eof_received(self) -> bool:
        """The client sends nothing more. Whoever waits for an answer has it, unless it turns out to be gone."""
        writer = self._writer
        waits = self._state is State.ANSWER and not writer.done
        if waits and not (self._visitor.end(self._loop) and (writer.begun or writer.interim())):
            self._transport.abort()
        return waits and not self._transport.is_closing()

    def shutdown(self) -> None:
        """Close with the next answer, or now if nothing is asked and something was answered."""
        self._writer.close = True
        if self._state is not State.HEAD or self._reader.unread:
            return
        if self._used:
            self._transport.close()
        else:
            self._deadline.set(self._loop.time() + FIRST_S)

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    @property
    def idle(self) -> bool:
        """Nothing is asked."""
        return self._state is State.HEAD

    def abort(self) -> None:
        self._transport.abort()

    def end(self) -> None:
        """End now; a request that has no answer yet is told why."""
        waiting = self._state is State.BODY or (self._state is State.ANSWER and not self._writer.begun)
        if not waiting or self._transport.is_closing():
            self._transport.abort()
            return
        self._refuse(Unavailable("The server is shutting down.", retry_after_s=1.0), linger=False)
        self._cancel()

    # -- what comes in

    def data_received(self, data: bytes) -> None:
        if self._state is State.LINGER or (self._state is State.ANSWER and self._writer.close):
            self._dropped += len(data)
            if self._dropped > DROPPED_BYTES:
                self._transport.abort()
            return
        if self._visitor.preface is not None:
            try:
                data = self._visitor.introduce(data)
            except HttpError as error:
                self._refuse(error)
                return
            if not data:
                return
        self._reader.receive(data)
        self._go_on()

    def _go_on(self) -> None:
        """Read what is here as far as its turn has come."""
        if self._state in _AT_WORK and not self._transport.is_closing():
            try:
                for _ in range(TURN_REQUESTS):
                    if not self._step() or self._state is State.ANSWER:
                        break
                else:
                    self._loop.call_soon(self._go_on)
            except HttpError as error:
                self._refuse(error)
            self._arm()
        self._settle()

    def _step(self) -> bool:
        """Whether something is done that more may follow."""
        reader, state = self._reader, self._state
        if state is State.HEAD:
            if self._writer.paused:
                return False  # the client does not read its answers: no more of them
            head = reader.head()
            if head is None:
                if self._visitor.ended:
                    self._transport.close()
                return False
            self._begin(head)
            state = self._state
            if state is not State.BODY:
                return True
        if state is not State.BODY and state is not State.DISCARD:
            return False
        if not reader.body():
            if reader.turn_over:
                self._loop.call_soon(self._go_on)
            elif self._visitor.ended:
                self._transport.close()
            return False
        if state is State.BODY:
            if not self._share.hold(reader.held):
                self._over_budget()
                return False
            self._run()
        else:
            self._next()
        return True

    def _settle(self) -> None:
        """Account for what is kept; what is too much of it is not waited for."""
        reader = self._reader
        if not self._share.hold(reader.held + self._running_bytes):
            self._over_budget()
        full = reader.unread > self._read_ahead
        if full and self._state is State.ANSWER:
            self._drop_unread()
            full = False
        if full != self._paused and not self._transport.is_closing():
            # Others have their turn, or the client does not read its answers: no request runs meanwhile.
            self._paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _drop_unread(self) -> None:
        """What came behind a request may come again on another connection."""
        self._writer.close = True
        self._reader.drop()
        self._charge()

    def _charge(self) -> bool:
        return self._share.hold(self._reader.held + self._running_bytes)

    def _over_budget(self) -> None:
        if self._state is State.HEAD or self._state is State.BODY:
            self._refuse(HttpError(503, "Too many large requests are arriving.", retry_after_s=1.0))
        elif self._state is not State.ANSWER:
            self._transport.abort()
        self._drop_unread()

    # -- one request

    def _begin(self, head: RequestHead) -> None:
        """The head is here; what speaks against the request is said before its body is read."""
        shared = self._shared
        self._writer.start(head)
        exchange: Exchange = shared.app.open(head)
        self._exchange = exchange
        self._writer.fields = exchange.fields
        error = exchange.error
        if error is None and head.content_length > shared.limits.body_bytes:
            error = HttpError(413, f"The request's body is larger than {shared.limits.body_bytes} bytes.")
        if error is None and exchange.guarded:
            try:
                self._visitor.ask(head)
            except HttpError as refusal:
                error = refusal
        self._share.rename(exchange.holder)
        if error is not None:
            self._turn_away(head, error)
            return
        self._state = State.BODY
        length = head.content_length
        if head.expects_continue and (length < 0 or length > self._reader.unread):
            self._transport.write(CONTINUE)

    def _turn_away(self, head: RequestHead, error: PinyonError) -> None:
        """Answer before the body has come. A small one is read to its end, for the next request comes behind it."""
        missing = head.content_length - self._reader.unread
        if head.content_length < 0 or missing > DISCARD_BYTES or (head.expects_continue and missing > 0):
            self._refuse(error)
            return
        self._write_error(error)
        self._reader.discard()
        self._state = State.DISCARD

    def _run(self) -> None:
        app, exchange, body = self._shared.app, self._exchange, self._reader.take_body()
        assert exchange is not None
        if exchange.plain:
            app.answer(exchange, body, self._writer)
            self._next()
            return
        self._running_bytes = len(body)
        self._state = State.ANSWER
        self._task = task = self._loop.create_task(self._serve(exchange, body))
        self._shared.tasks.add(task)

    async def _serve(self, exchange: Exchange, body: bytes | bytearray) -> None:
        try:
            await self._shared.app.serve(exchange, body, self._writer)
        finally:
            self._served()

    def _served(self) -> None:
        """In its task's last step: one turn of the loop less than to be called back."""
        if self._task is None:
            return
        self._shared.tasks.discard(self._task)
        self._task = None
        self._running_bytes = 0
        if self._state is State.ANSWER:
            if self._writer.done:
                self._next()
            else:
                self._transport.abort()  # the rest of its answer will never come
        if self._reader.unread or self._paused or self._writer.paused or self._visitor.ended:
            self._go_on()
        else:
            self._share.hold(0)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.add_done_callback(lambda _: self._served())  # where it had not begun, it says nothing itself
            self._task.cancel()

    def _next(self) -> None:
        """The request is over."""
        self._visitor.answered()
        self._writer.finish()
        self._used = True
        self._exchange = None
        self._since = 0.0
        limits, now = self._shared.limits, self._loop.time()
        if self._writer.close:
            self._state = State.LINGER
            self._deadline.set(now + limits.write_stall_s)
            self._transport.close()
        else:
            self._state = State.HEAD
            self._deadline.set(now + limits.idle_s)

    def _write_error(self, error: PinyonError) -> None:
        exchange = self._exchange
        status = self._writer.error(error)
        if self._task is None:  # who runs says by itself how it ended
            self._shared.app.refused(exchange, status)

    def _refuse(self, error: PinyonError, *, linger: bool = True) -> None:
        """The last answer: nothing that follows could be made sense of, or is worth it."""
        self._writer.close = True
        self._write_error(error)
        self._writer.silence()
        self._reader.drop()
        self._reader.discard()
        self._state = State.LINGER
        shared = self._shared
        if not linger or shared.lingering >= LINGERING_MAX:
            self._transport.close()
            return
        shared.lingering += 1
        self._lingers = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._deadline.set(self._loop.time() + LINGER_S)

    # -- slow readers

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()
        if self._reader.unread:
            self._go_on()
        elif self._state is State.HEAD:  # what it was slow to read was the last answer: idle from here on
            self._deadline.set(self._loop.time() + self._shared.limits.idle_s)

    # -- time

    def _arm(self) -> None:
        """The time by which more must have come."""
        state, limits = self._state, self._shared.limits
        if state is State.ANSWER or (state is State.HEAD and self._writer.paused):
            self._deadline.due = inf  # how long a request may take, and a client may read nothing, others see to
            self._since = 0.0
        elif state is State.BODY or state is State.DISCARD or (state is State.HEAD and self._reader.unread):
            self._since = self._since or self._loop.time()
            arrival_s = min(limits.head_s, limits.arrival_s) if state is State.HEAD else limits.arrival_s
            self._deadline.set(self._since + arrival_s)

    def _late(self) -> None:
        if self._state is State.BODY or (self._state is State.HEAD and self._reader.unread):
            self._refuse(HttpError(408, "The request did not arrive in time."))
        else:
            self._transport.abort()
