"""A stream's messages as an event loop's tasks read and write them, the same at either end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc

from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.http2.connection import MESSAGE_BYTES
from pinyon.runtime.http2.protocol import Http2Protocol
from pinyon.runtime.http2.stream import Field, Stream, StreamFailed

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
"""What ``read`` gives when no more messages come, as with grpcio."""


class MessageStream:
    """A :class:`pinyon.runtime.http2.stream.Receiver`. One task reads and one writes, at most."""

    def __init__(self, protocol: Http2Protocol, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> None:
        self._protocol = protocol
        self._decode = decode
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._messages: deque[bytes] = deque()
        self._waiting: asyncio.Future[Awaitable[None] | None] | None = None
        """The reader; what it is given is to be awaited."""
        self._take: Callable[[Any], Awaitable[None] | None] | None = None
        """Takes messages as they come, while the reader waits for something else to do."""
        self._writing: asyncio.Future[None] | None = None
        """The writer, while there is no room."""
        self._no_more = False
        """The peer sends nothing more."""
        self._error: BaseException | None = None
        """Why there is nothing more to read, other than the peer's good end."""

    # -- reading

    async def read(self) -> Any:
        """The next message, or the end. Raises what the stream ended with, once."""
        while not self._messages:
            if self._error is not None:
                error, self._error, self._no_more = self._error, None, True
                try:
                    raise error
                finally:
                    del error  # or it would hold this frame, and that the stream
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
        """``take`` each message to the end, one after another: right where it is read from the socket, and here if
        there is something to await. Raises what ``take`` does, or what the stream ended with."""
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
        """Whether a message could be sent now."""
        stream = self._stream
        if stream is None or stream.closed or stream.local_closed:
            return False
        return not stream.blocked and not self._protocol.paused

    def push(self, message: Any) -> bool:
        """Send it if the peer has room for it now, else do nothing. Raises :class:`ResourceExhausted` for one that is
        too large."""
        stream = self._stream
        if stream is None or not self.has_room():
            return False
        encoded = self._encode(message)
        if len(encoded) > MESSAGE_BYTES:
            raise ResourceExhausted(f"a message of {len(encoded)} bytes: {MESSAGE_BYTES} are taken")
        stream.send(encoded)
        return True

    async def write(self, message: Any) -> None:
        """Send it when the peer has room for it. Raises :class:`asyncio.InvalidStateError` when the stream is over:
        reading says why."""
        await self._room()
        if not self.push(message):
            raise asyncio.InvalidStateError("the call is over")
        await self._room()

    async def _room(self) -> None:
        """Until what was sent before has gone. Raises :class:`asyncio.InvalidStateError`."""
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

    # -- what the stream says

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
            stops = isinstance(error, StopIteration)  # which no future takes
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
    """It came in the moment in which nobody was there to await it any more."""
    if isinstance(doing, Coroutine):
        doing.close()
