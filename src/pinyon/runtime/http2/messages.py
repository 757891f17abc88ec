"""The messages of a stream, as tasks of an event loop read and write them; the same at either end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc

from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.http2.protocol import Http2Protocol
from pinyon.runtime.http2.stream import MESSAGE_BYTES, Field, Http2Stream, StreamFailed

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
"""The value that ``read`` returns when no more messages come, as with grpcio."""


class MessageStream:
    """A :class:`pinyon.runtime.http2.stream.Receiver` for at most one task that reads and one that writes."""

    def __init__(self, protocol: Http2Protocol, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> None:
        self._protocol = protocol
        self._decode = decode
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._stream: Http2Stream | None = None
        self._messages: deque[bytes] = deque()
        self._waiting: asyncio.Future[Awaitable[None] | None] | None = None
        """The waiting reader's future, whose result the reader has to await, if any."""
        self._take: Callable[[Any], Awaitable[None] | None] | None = None
        """The reader's function that takes messages as they come, while the reader waits."""
        self._writing: asyncio.Future[None] | None = None
        """The writer's future, while there is no room."""
        self._no_more = False
        """True once the peer sends nothing more."""
        self._error: BaseException | None = None
        """The error that ended reading; None after the peer's normal end."""

    # -- reading

    async def read(self) -> Any:
        """Returns the next message, or :data:`EOF`. Raises the error that ended the stream, once."""
        while not self._messages:
            if self._error is not None:
                error, self._error, self._no_more = self._error, None, True
                try:
                    raise error
                finally:
                    del error  # or the error would keep this frame, and so the stream, alive
            if self._no_more:
                return EOF
            if self._waiting is not None:
                raise RuntimeError("a stream has one reader")
            self._waiting = self._loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._next()

    async def each(self, take: Callable[[Any], Awaitable[None] | None]) -> None:
        """Calls ``take`` with each message, in order, until the end of the stream.

        The calls come directly from the socket; what ``take`` returns is awaited here. Raises the error of ``take``, or
        the error that ended the stream."""
        while True:
            while self._messages:
                doing = take(self._next())
                if doing is not None:
                    await doing
            if self._error is not None or self._no_more:
                await self.read()
                return
            waiting = self._waiting = self._loop.create_future()
            self._take = take
            try:
                doing = await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                    _drop(waiting.result())
                raise
            finally:
                self._waiting = self._take = None
            if doing is not None:
                await doing

    def _next(self) -> Any:
        message = self._messages.popleft()
        if self._stream is not None:
            self._stream.taken(len(message))
        return self._decode(message)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- writing

    def has_room(self) -> bool:
        """Returns whether a message could be sent now."""
        stream = self._stream
        if stream is None or stream.closed or stream.local_closed:
            return False
        return not stream.blocked and not self._protocol.paused

    def push(self, message: Any) -> bool:
        """Sends a message if the peer has room now, and returns whether it did. Raises :class:`ResourceExhausted` for
        a message that is too large."""
        stream = self._stream
        if stream is None or not self.has_room():
            return False
        encoded = self._encode(message)
        if len(encoded) > MESSAGE_BYTES:
            raise ResourceExhausted(f"a message of {len(encoded)} bytes: {MESSAGE_BYTES} are taken")
        stream.send(encoded)
        return True

    async def write(self, message: Any) -> None:
        """Sends a message when the peer has room. Raises :class:`asyncio.InvalidStateError` when the stream is over;
        then :meth:`read` raises the reason."""
        await self._room()
        if not self.push(message):
            raise asyncio.InvalidStateError("the call is over")
        await self._room()

    async def _room(self) -> None:
        """Waits until all was sent. Raises :class:`asyncio.InvalidStateError` if the stream is over."""
        stream = self._stream
        while stream is not None and not stream.closed and (stream.blocked or self._protocol.paused):
            self._writing = self._loop.create_future()
            self._protocol.writers.add(self._writing)
            try:
                await self._writing
            finally:
                self._protocol.writers.discard(self._writing)
                self._writing = None
        if stream is None or stream.closed or stream.local_closed:
            raise asyncio.InvalidStateError("the call is over")

    # -- called by the stream

    def headed(self, fields: Sequence[Field], end: bool) -> None:
        pass

    def message(self, message: bytes) -> None:
        self._messages.append(message)
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        if self._take is None:
            waiting.set_result(None)
            return
        try:
            doing = self._take(self._next())
        except BaseException as error:
            stops = isinstance(error, StopIteration)  # a future does not accept it
            waiting.set_exception(RuntimeError(repr(error)) if stops else error)
            if not isinstance(error, Exception):
                raise
            return
        if doing is not None:
            waiting.set_result(doing)

    def half_closed(self) -> None:
        self._no_more = True
        self._wake()

    def refused(self, error: StreamFailed) -> None:
        pass

    def failed(self, error: StreamFailed) -> None:
        self._no_more = True
        self._wake()
        self.writable()

    def writable(self) -> None:
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)


def _drop(doing: Awaitable[None] | None) -> None:
    """Closes a coroutine that was made when no reader was left to await it."""
    if isinstance(doing, Coroutine):
        doing.close()
