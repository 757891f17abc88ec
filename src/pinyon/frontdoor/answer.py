"""An answer as it comes from a server: its head, then its bytes, no faster than they are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pinyon.core.errors import PinyonError
from pinyon.frontdoor.failures import Broke

HIGH_BYTES = 256 << 10
"""With more that nobody has taken the server is not read any further, until it is taken."""


class Source(Protocol):
    """Where its bytes come from."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def give_up(self, answer: Answer) -> None:
        """It is of no interest any more."""
        ...


class Answer:
    """Of any target: a server, or another region. A :class:`Source` fills it. ``close`` at the end, however that
    came."""

    __slots__ = ("_error", "_paused", "_pieces", "_push", "_size", "_source", "_waiter", "begun", "complete", "fields",
                 "has_head", "length", "status")  # fmt: skip

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source
        self._pieces: list[bytes] = []
        self._size = 0
        self._paused = False
        self._error: PinyonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._push: Callable[[bytes], bool] | None = None
        self.length = -1
        """Bytes of the body, if it said so; -1: it did not."""
        self.status = 0
        self.fields: list[tuple[bytes, bytes]] = []
        """Header fields, names in lower case."""
        self.begun = False
        """A byte of it has come."""
        self.has_head = False
        self.complete = False
        """All of it is here."""

    async def head(self) -> None:
        """Until the head is here. Raises :class:`Broke`, or what it :meth:`failed` with; whoever does not want it any
        more (cancelled) says so to the server."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            try:
                await self._wait()
            except BaseException:
                self.close()
                raise

    async def read(self) -> bytes:
        """What has come since, as soon as there is something; empty at the end. Raises :class:`PinyonError` where it
        ends early."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            await self._wait()
        return self._take()

    async def whole(self, bytes_max: int) -> bytes | None:
        """All of it; ``None`` if that is more than so many bytes. Raises as :meth:`read`."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > bytes_max:
                return None
        return b"".join(pieces)

    async def pour(self, push: Callable[[bytes], bool]) -> None:
        """What comes is given to ``push`` as it comes, until that says that it takes no more so, or the last of it is
        here, or it ends early: what is left then is to be :meth:`read`. Raises what ``push`` does."""
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
        """Nobody wants more of it: if it is not complete, the server learns of that. Calling it twice is fine."""
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

    # -- the source's part

    def got_head(self, status: int, fields: list[tuple[bytes, bytes]], length: int) -> None:
        """As for :meth:`got` and :meth:`got_all`, whoever waits learns of it when it has :meth:`arrived`."""
        self.status, self.fields, self.length = status, fields, length
        self.has_head = True

    def got(self, data: bytes) -> None:
        if self._source is None:
            return
        self._pieces.append(data)
        if self._push is not None:
            return  # it is taken as soon as it has arrived
        self._size += len(data)
        if self._size > HIGH_BYTES and not self._paused:
            self._paused = True
            self._source.pause()

    def got_all(self) -> None:
        self.complete = True
        self._source = None

    def arrived(self) -> None:
        """What has been got since is all that came at once."""
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
        """What has come can be read still."""
        self.failed(Broke(message, begun=self.begun))

    def failed(self, error: PinyonError) -> None:
        """As :meth:`broke`, with another reason."""
        if not self.complete and self._error is None:
            self._error = error
            self._source = None
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
