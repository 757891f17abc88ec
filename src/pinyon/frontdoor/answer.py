"""A server's answer as it arrives: first its head, then its bytes, no faster than they are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pinyon.core.errors import PinyonError
from pinyon.frontdoor.failures import Broke

HIGH_BYTES = 256 << 10
"""Reading from the server pauses while more bytes than this have not been taken."""


class AnswerSource(Protocol):
    """The connection or stream that an answer's bytes come from."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def give_up(self, answer: Answer) -> None:
        """Learns that nobody wants the answer any more."""
        ...


class Answer:
    """The answer of a server or of another region, filled by an :class:`AnswerSource`. Its reader must ``close`` it."""

    __slots__ = ("_error", "_paused", "_pieces", "_push", "_size", "_source", "_waiter", "begun", "complete", "fields",
                 "has_head", "length", "status")  # fmt: skip

    def __init__(self, source: AnswerSource) -> None:
        self._source: AnswerSource | None = source
        self._pieces: list[bytes] = []
        self._size = 0
        self._paused = False
        self._error: PinyonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._push: Callable[[bytes], bool] | None = None
        self.length = -1
        """The body's length in bytes as the head declares it, or -1 if it does not."""
        self.status = 0
        self.fields: list[tuple[bytes, bytes]] = []
        """The header fields, with names in lower case."""
        self.begun = False
        """True once a byte of the answer has arrived."""
        self.has_head = False
        self.complete = False
        """True once the whole answer has arrived."""

    async def head(self) -> None:
        """Waits until the head has arrived; if cancelled meanwhile, tells the server that nobody wants the answer.
        Raises :class:`Broke`, or the error given to :meth:`failed`."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            try:
                await self._wait()
            except BaseException:
                self.close()
                raise

    async def read(self) -> bytes:
        """Returns the bytes that have arrived since the last call, once there are any; empty at the end. Raises
        :class:`PinyonError` if the answer ends early."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            await self._wait()
        return self._take()

    async def whole(self, bytes_max: int) -> bytes | None:
        """Returns the rest of the body, or None if it has more than ``bytes_max`` bytes. Raises as :meth:`read`."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > bytes_max:
                return None
        return b"".join(pieces)

    async def pour(self, push: Callable[[bytes], bool]) -> None:
        """Passes bytes to ``push`` as they arrive, until ``push`` returns False, the answer is complete, or it ends
        early. Whatever is left must then be :meth:`read`. Raises what ``push`` raises."""
        if self._pieces or self.complete or self._error is not None:
            return
        self._push = push
        try:
            await self._wait()
        finally:
            self._push = None

    def _take(self) -> bytes:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if self._paused:
            self._paused = False
            if self._source is not None:
                self._source.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Declares that nobody wants more; a server that has not finished learns of that. May be called twice."""
        source, self._source = self._source, None
        if source is not None:
            self._pieces.clear()
            source.give_up(self)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # -- called by the source

    def got_head(self, status: int, fields: list[tuple[bytes, bytes]], length: int) -> None:
        """Stores the head. As with :meth:`got` and :meth:`got_all`, the reader learns of it by :meth:`arrived`."""
        self.status, self.fields, self.length = status, fields, length
        self.has_head = True

    def got(self, data: bytes) -> None:
        if self._source is None:
            return
        self._pieces.append(data)
        if self._push is not None:
            return  # it is taken as soon as ``arrived`` is called
        self._size += len(data)
        if self._size > HIGH_BYTES and not self._paused:
            self._paused = True
            self._source.pause()

    def got_all(self) -> None:
        self.complete = True
        self._source = None

    def arrived(self) -> None:
        """Hands over what has been stored since the last call; the source calls it once for each of its reads."""
        push = self._push
        if push is None or self.complete:
            self._wake()
            return
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        try:
            if push(pieces[0] if len(pieces) == 1 else b"".join(pieces)):
                return
        except Exception as error:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
        self._push = None
        self._wake()

    def broke(self, message: str) -> None:
        """Ends the answer early as :class:`Broke`; what has arrived can still be read."""
        self.failed(Broke(message, begun=self.begun))

    def failed(self, error: PinyonError) -> None:
        """Ends the answer early as :meth:`broke` does, with the given error."""
        if not self.complete and self._error is None:
            self._error = error
            self._source = None
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
