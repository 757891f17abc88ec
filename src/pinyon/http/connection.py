"""One HTTP/1.1 connection: request by request, one answer at a time.

Reading continues while a request is answered, because a socket that is not read does not show that its client has left.
Bytes that arrive behind the request are kept. If they exceed a bound they are dropped, and the connection closes after
the answer. A client that has left cancels its request; a client that has only closed its sending side gets its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from math import inf
from typing import cast

from pinyon.core.errors import PinyonError, Unavailable
from pinyon.http.answer import CONTINUE, HttpError
from pinyon.http.budget import Share
from pinyon.http.reader import RequestReader
from pinyon.http.request import RequestHead
from pinyon.http.state import Exchange, HttpState
from pinyon.http.visitor import Visitor
from pinyon.http.writer import ReplyWriter
from pinyon.runtime.deadlines import Deadline

READ_AHEAD_BYTES = 1 << 20
"""The maximum number of bytes of pipelined requests that are kept."""
DISCARD_BYTES = 64 << 10
"""The largest rest of a refused body that is read to its end, so that the connection stays open."""
DROPPED_BYTES = 16 << 20
"""The maximum bytes read and dropped after the last request; unread bytes would reset the connection too early."""
LINGER_S = 2.0
"""The time for which the bytes of a refused client are read and dropped."""
LINGERING_MAX = 256
FIRST_S = 3.0
"""The time that a connection without any request gets when the server ends: a request may be under way."""
TURN_REQUESTS = 16
"""The number of requests that a connection may process before others get their turn."""


class State(IntEnum):
    """The state of a connection in the exchange of requests and answers."""

    HEAD = 0  # reading the head of the next request
    BODY = 1
    ANSWER = 2
    DISCARD = 3  # dropping the body of a request that was already answered
    LINGER = 4  # dropping everything that arrives
    CLOSED = 5


_AT_WORK = (State.HEAD, State.BODY, State.DISCARD)


class ServerConnection(asyncio.Protocol):
    """The protocol of one connection, made by the server, which calls ``shutdown`` and ``end``."""

    __slots__ = ("_admitted", "_arrived", "_deadline", "_dropped", "_exchange", "_lingers", "_loop", "_paused",
                 "_read_ahead", "_reader", "_running_bytes", "_share", "_shared", "_since", "_state", "_task",
                 "_transport", "_used", "_visitor", "_writer")  # fmt: skip

    def __init__(
        self, shared: HttpState, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None] | None = None
    ) -> None:
        """Creates the protocol; ``arrived`` is called when the connection begins to count as one of its own."""
        self._shared = shared
        self._arrived = arrived
        self._loop = loop
        self._reader = RequestReader(shared.limits)
        self._read_ahead = max(READ_AHEAD_BYTES, shared.limits.head_bytes)  # an incomplete head counts as unread
        self._state = State.HEAD
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._admitted = self._lingers = self._paused = self._used = False
        self._share = Share(shared.budget)
        self._running_bytes = 0
        """The size of the body of the request that is being answered."""
        self._dropped = 0
        self._since = 0.0
        """The loop's time at which the arriving request began; 0 if no request is arriving."""
        self._deadline = Deadline(loop, self._late)

    # -- life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        shared = self._shared
        self._transport = cast("asyncio.Transport", transport)
        self._writer = ReplyWriter(shared, self._loop, self._transport)
        self._visitor = Visitor(shared, transport)
        shared.connections.add(self)
        shared.gauge.inc()
        arrived, self._arrived = self._arrived, None  # the objects that it refers to may be freed early
        if arrived is not None:
            arrived()
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
        """Keeps the transport open if the client, which has ended its sending side, still waits for an answer.

        Aborts it where the client's leaving could not be noticed: with TLS, without TCP, or with HTTP/1.0 before the
        answer."""
        writer = self._writer
        waits = self._state is State.ANSWER and not writer.done
        if waits and not (self._visitor.end(self._loop) and (writer.begun or writer.interim())):
            self._transport.abort()
        return waits and not self._transport.is_closing()

    def shutdown(self) -> None:
        """Closes the connection after the next answer, or now if it is idle and has answered a request before.

        A connection without any request yet gets :data:`FIRST_S`."""
        self._writer.close = True
        if self._state is not State.HEAD or self._reader.unread:
            return
        if self._used:
            self._transport.close()
        else:
            self._deadline.set(self._loop.time() + FIRST_S)

    def abort(self) -> None:
        self._transport.abort()

    def end(self) -> None:
        """Closes the connection now; a request without an answer is told that the server shuts down."""
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
        """Processes the received bytes until this connection's turn is over."""
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
        """Takes one step in the received bytes and returns whether another step may follow."""
        reader, state = self._reader, self._state
        if state is State.HEAD:
            if self._writer.paused:
                return False  # the client does not read its answers, so it gets no more of them
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
        """Accounts for the bytes that are kept, and stops reading or drops bytes if there are too many."""
        reader = self._reader
        if not self._share.hold(reader.held + self._running_bytes):
            self._over_budget()
        full = reader.unread > self._read_ahead
        if full and self._state is State.ANSWER:
            self._drop_unread()
            full = False
        if full != self._paused and not self._transport.is_closing():
            # Other connections have their turn, or the client does not read its answers; no request runs now.
            self._paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _drop_unread(self) -> None:
        """Drops the unread bytes and closes after this answer: the client can repeat them on another connection."""
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
        """Starts a request whose head is complete; refuses it, if it must, before its body is read."""
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
        """Answers with an error before the body has come; reads a small body to its end, to reach the next request."""
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
        """Ends the request within its task's last step, one turn of the loop earlier than a done callback would."""
        if self._task is None:
            return
        self._shared.tasks.discard(self._task)
        self._task = None
        self._running_bytes = 0
        if self._state is State.ANSWER:
            if self._writer.done:
                self._next()
            else:
                self._transport.abort()  # the rest of the answer will never come
        if self._reader.unread or self._paused or self._writer.paused or self._visitor.ended:
            self._go_on()
        else:
            self._share.hold(0)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.add_done_callback(lambda _: self._served())  # a task that never started cannot call it
            self._task.cancel()

    def _next(self) -> None:
        """Ends the current request and makes the connection ready for the next one."""
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
        if self._task is None:  # a running task reports its outcome itself
            self._shared.app.refused(exchange, status)

    def _refuse(self, error: PinyonError, *, linger: bool = True) -> None:
        """Sends an error as the last answer and drops all that follows, which is unreadable or not worth reading."""
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
        elif self._state is State.HEAD:  # the slow read was of the last answer, so the idle time begins now
            self._deadline.set(self._loop.time() + self._shared.limits.idle_s)

    # -- time

    def _arm(self) -> None:
        """Sets the time by which more bytes must have arrived."""
        state, limits = self._state, self._shared.limits
        if state is State.ANSWER or (state is State.HEAD and self._writer.paused):
            self._deadline.due = inf  # the app limits the request's time, the writer the client's stall
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
