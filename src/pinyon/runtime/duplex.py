"""A long-lived stream of messages both ways between two processes, the same at either end.

The parts that all such streams share:

- **connect**: a stream that is not connected within about 2 s has ended (:mod:`pinyon.runtime.channel`);
- **write deadline**: a peer that takes no message for ``write_s`` is frozen, and the stream ends;
- **end**: the first failure of reading or writing, or the owner by ``end``, ends the rest, and ``run`` raises why, as
  a :class:`PinyonError`. Normally, the side that dialed sends its last message, the side that accepted answers what
  is left (``drain``), and ``run`` returns;
- **back-off**: :class:`Redialer` dials again after a pause that doubles until the peer has spoken.

Sessions pass a function that takes each message and an iterator of the messages to send. Their spacing is the
iterator's part (``pace``). gRPC is not visible outside this file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from pinyon.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PermissionDenied,
    PinyonError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from pinyon.runtime.channel import OpenSession, open_session
from pinyon.runtime.deadlines import deadlines_of
from pinyon.runtime.http2.client import Http2Call
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

WRITE_S = 5.0
"""Seconds after which a peer that takes no message is frozen."""
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
_REFUSALS = (InvalidArgument, Unauthenticated, PermissionDenied, FailedPrecondition)
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs

Sent = TypeVar("Sent", bound=Message)
Sent_co = TypeVar("Sent_co", bound=Message, covariant=True)
Received = TypeVar("Received", bound=Message)
Take = Callable[[Received], Awaitable[None] | None]
"""A function that takes one message; the next message is read when it is done."""

_log = get_logger("duplex")


class Messages(Protocol[Sent_co]):
    """The messages to send, for example as an asynchronous generator."""

    def __aiter__(self) -> AsyncIterator[Sent_co]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Method(Generic[Sent, Received]):
    """A streaming method as the side that dials sees it. ``path`` is ``/package.Service/Method``."""

    path: str
    sent: type[Sent]
    received: type[Received]


class Duplex(Generic[Sent, Received]):
    """The common part of both ends; a stream runs once."""

    def __init__(self, write_s: float) -> None:
        self._write_s = write_s
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._blocked_s: float | None = None
        """The loop's time of the last push, if the peer had no room for all of it, or of a write that goes on."""
        self._deadlines = deadlines_of(self._loop)
        self._watch: int | None = None
        """The slot in the deadlines, while one watches the writes."""
        self._ending: asyncio.Future[None] = self._loop.create_future()
        self._read: Callable[[], Awaitable[Any]]
        self._each: Callable[[Take[Any]], Awaitable[None]]
        self._send: Callable[[Sent], Awaitable[None]]
        self._push: Callable[[Sent], bool] = _not_at_once
        self._has_room: Callable[[], bool] = _never
        self.spoke = False
        """True once the peer has sent a message."""

    @property
    def ending(self) -> bool:
        """True once the stream has ended or is about to, so that nothing more is sent."""
        return self._ending.done()

    def end(self, reason: PinyonError | None = None) -> None:
        """Ends the stream from this side at once: ``run`` raises ``reason``, or returns. Only the first call counts."""
        if self._ending.done():
            return
        if reason is None:
            self._ending.set_result(None)
        else:
            self._ending.set_exception(reason)
            self._ending.exception()  # retrieved, or asyncio warns

    def _carry(self, carrier: Any) -> None:
        """Sets what carries messages: the event loop's own stream, or the context of a grpcio server."""
        self._read, self._send = carrier.read, carrier.write
        self._each = getattr(carrier, "each", self._each_read)
        self._push = getattr(carrier, "push", _not_at_once)
        self._has_room = getattr(carrier, "has_room", _never)

    def _drop(self) -> None:
        """Releases the carrier, as no message is sent or received any more."""
        self._read = self._each = self._send = _over
        self._push, self._has_room = _not_at_once, _never

    async def _each_read(self, take: Take[Any]) -> None:
        read = self._read
        while (message := await read()) is not _EOF:
            doing = take(message)
            if doing is not None:
                await doing

    @property
    def has_room(self) -> bool:
        """True if :meth:`push` would send now; never, if the carrier cannot send at once."""
        return not self._writing.locked() and self._has_room()

    def push(self, message: Sent) -> bool:
        """Sends one message now if there is room, and returns whether it did.

        If the peer has no room for all of it, the rest has the same deadline as a write."""
        if self._writing.locked() or not self._push(message):
            return False
        if self._has_room():
            self._blocked_s = None
        else:
            self._blocked_s = self._loop.time()
            self._watch_writes()
        return True

    def say(self, message: Sent) -> Awaitable[None] | None:
        """Sends one message as :meth:`write` does, and returns what the caller has to await, if anything."""
        return None if self.push(message) else self.write(message)

    async def write(self, message: Sent) -> None:
        """Sends one message besides those of the iterator; for use in ``take``. The end of the stream cancels it."""
        if self.push(message):
            return
        async with self._writing:
            self._blocked_s = self._loop.time()
            self._watch_writes()
            try:
                await self._send(message)
            finally:
                self._blocked_s = None

    def _watch_writes(self) -> None:
        if self._watch is None:
            self._watch = self._deadlines.add(self, self._loop.time() + self._write_s)

    def is_over(self) -> None:
        """Ends the stream if a write takes too long."""
        self._watch = None
        if self._has_room() and not self._writing.locked():
            self._blocked_s = None
        began_s = self._blocked_s
        if began_s is None or self.ending:
            return
        if began_s + self._write_s > self._loop.time():
            self._watch = self._deadlines.add(self, began_s + self._write_s)
        else:
            self.end(ResourceExhausted(f"the peer took no message for {self._write_s:g} s"))

    async def _converse(
        self, reading: Awaitable[None], writing: Awaitable[None] | None, ends_with_reading: bool
    ) -> None:
        """Runs the stream to its end, and raises the reason as a :class:`PinyonError`."""
        reader = asyncio.ensure_future(reading)
        writer = None if writing is None else asyncio.ensure_future(writing)
        last = reader if writer is None or ends_with_reading else writer
        everything: list[asyncio.Future[None]] = [self._ending, reader, *(() if writer is None else (writer,))]
        left = set(everything)
        try:
            while not last.done():
                left = (await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED))[1]
                for each in everything:
                    if each.done() and (failure := _failure(each)) is not None:
                        try:
                            raise failure
                        finally:
                            del failure
                if self._ending.done():
                    break
        finally:
            self.end()
            if self._watch is not None:
                self._deadlines.remove(self, self._watch)
            for each in everything[1:]:
                each.cancel()
            await asyncio.wait(everything)
            for each in everything[1:]:
                if not each.cancelled():
                    each.exception()  # retrieved; only the first failure counts
            # A failure refers to this frame by its traceback. The circle would keep the call alive until a garbage
            # collection.
            self._ending = self._loop.create_future()
            self._ending.set_result(None)
            del reader, writer, last, everything, left, each

    async def _read_all(self, take: Take[Received], drain: Callable[[], Awaitable[None]] | None = None) -> None:
        def spoken(message: Received) -> Awaitable[None] | None:
            self.spoke = True
            return take(message)

        await self._each(spoken)
        if drain is not None:
            await drain()

    async def _write_all(self, messages: Messages[Sent]) -> None:
        async with aclosing(messages):
            async for message in messages:
                if not self.push(message):
                    await self.write(message)


class Dialed(Duplex[Sent, Received]):
    """The end that opens the stream, to ``address`` (``host:port``), by dialing with ``connect``."""

    def __init__(
        self,
        address: str,
        method: Method[Sent, Received],
        write_s: float = WRITE_S,
        connect: OpenSession = open_session,
    ) -> None:
        super().__init__(write_s)
        self.address = address
        self._method = method
        self._connect = connect
        self.connected = False
        """True once the peer was reached; it may have received what was sent."""

    async def run(self, take: Take[Received], messages: Messages[Sent]) -> None:
        """Connects, and runs until the peer ends the stream. When ``messages`` end, the peer is told that no more come.

        Raises the :class:`PinyonError` that ended it: the peer's status, or :class:`Unavailable` if no peer is there.
        """
        method = self._method
        call = self._connect(self.address, method.path, method.sent.SerializeToString, method.received.FromString)
        self._carry(call)
        try:
            await self._converse(self._read_all(take), self._write_to(call, messages), ends_with_reading=True)
        finally:
            call.cancel()
            await call.close()
            del call
            self._drop()

    async def _write_to(self, call: Http2Call, messages: Messages[Sent]) -> None:
        try:
            await call.wait_for_connection()
            self.connected = True
            await self._write_all(messages)
            async with asyncio.timeout(self._write_s):
                await call.done_writing()
        except asyncio.InvalidStateError:
            return  # the call is over, and its reads say why


class Accepted(Duplex[Sent, Received]):
    """The end of a server, whose method was called with ``context``."""

    def __init__(self, context: Any, write_s: float = WRITE_S) -> None:
        super().__init__(write_s)
        self._carry(context)

    async def first(self, within_s: float) -> Received | None:
        """Returns the first message, before ``run``; None if none is to come. Raises :class:`DeadlineExceeded`."""
        try:
            async with asyncio.timeout(within_s):
                message = await self._read()
        except TimeoutError:
            raise DeadlineExceeded(f"no message came within {within_s:g} s") from None
        return None if message is _EOF else message

    async def run(
        self,
        take: Take[Received],
        messages: Messages[Sent] | None = None,
        drain: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Runs until the peer sends nothing more; then awaits ``drain``, if given, after which ``messages`` must end.

        Raises the :class:`PinyonError` that ended the stream. A peer that is gone cancels the caller, as gRPC does."""
        writing = None if messages is None else self._write_all(messages)
        await self._converse(self._read_all(take, drain), writing, ends_with_reading=drain is None)


async def _over(*_: object) -> Any:
    raise Unavailable("the stream is over")


def _not_at_once(_: object) -> bool:
    return False


def _never() -> bool:
    return False


def _failure(task: asyncio.Future[None]) -> PinyonError | None:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return None
    if isinstance(error, PinyonError):
        return error.with_traceback(None)  # whose frames would keep the call alive
    if isinstance(
        error, (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError, TimeoutError)
    ):
        return Unavailable("the peer is gone")
    _log.error("a stream failed", exc_info=error)
    return Internal("internal error")


class Redialer(Generic[Sent, Received]):
    """A stream to a peer that is opened again whenever it ends; ``converse`` runs each one. ``start`` → ``close``.

    A pause follows each stream, and doubles from 0.05 s to 2 s until a peer has spoken. ``peer`` is the peer's name in
    the log."""

    def __init__(
        self,
        peer: str,
        address: str,
        method: Method[Sent, Received],
        converse: Callable[[Dialed[Sent, Received]], Awaitable[None]],
        *,
        connect: OpenSession = open_session,
        log: logging.Logger = _log,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._peer = peer
        self._address = address
        self._method = method
        self._converse = converse
        self._connect = connect
        self._log = log
        self._sleep = sleep
        self._pause_s = FIRST_PAUSE_S / 2
        self._task: asyncio.Task[None] | None = None
        self.closing = False
        """True once no further stream will be opened."""

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("a redialer starts once")
        self._task = asyncio.create_task(self._run(), name=f"{self._peer} {self._address}")

    async def close(self, farewell_s: float = 0.0) -> None:
        """Closes the redialer; a stream that ends by itself may take ``farewell_s`` for that."""
        self.closing = True
        if self._task is None:
            return
        if farewell_s:
            await asyncio.wait({self._task}, timeout=farewell_s)
        await ended(self._task)
        self._task = None

    async def _run(self) -> None:
        while not self.closing:
            await self._once()

    async def _once(self) -> None:
        """Runs one stream, and waits for the pause after it."""
        began_s = time.monotonic()
        stream = Dialed(self._address, self._method, connect=self._connect)
        try:
            await self._converse(stream)
        except PinyonError as error:
            if isinstance(error, _REFUSALS):  # the peer is there, and gives a reason
                self._log.warning("the %s at %s refuses: %s", self._peer, self._address, error.message)
            else:
                self._log.info("no %s at %s: %s: %s", self._peer, self._address, error.grpc_code, error.message)
        except Exception:
            self._log.exception("%s session failed", self._peer)
        if self.closing:
            return
        anew = stream.spoke or time.monotonic() - began_s > MAX_PAUSE_S
        self._pause_s = FIRST_PAUSE_S if anew else min(MAX_PAUSE_S, 2 * self._pause_s)
        await self._sleep(self._pause_s)
