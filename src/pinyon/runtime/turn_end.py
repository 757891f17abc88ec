"""When what waits for a stream goes: at the end of the loop's turn in which the first of it came, or as soon after it
as its pace allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pinyon.runtime.duplex import Duplex
from pinyon.runtime.pace import Pace


class TurnEnd:
    """While the peer takes what comes, no task has to be woken for it; else the stream's writer has it.

    All on one event loop. What waits is its owner's, who says that something :meth:`come`\\ s.
    """

    def __init__(self, pace: Pace, send: Callable[[Duplex[Any, Any]], bool]) -> None:
        """``send`` pushes what waits into the stream, as far as that takes it; whether some is left. What it raises
        ends the stream, by the writer."""
        self._pace = pace
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._stream: Duplex[Any, Any] | None = None
        self._going: asyncio.Handle | None = None
        self._behind = True
        """The writer has what waits."""
        self._news = asyncio.Event()
        """For the writer."""
        self._failure: Exception | None = None

    def by(self, stream: Duplex[Any, Any] | None) -> None:
        """What waits may go past the writer, by this stream; None: no more."""
        self._stream = stream

    def come(self) -> None:
        """Something waits."""
        if self._behind:
            self._news.set()
        elif self._going is None:
            self._going = self._loop.call_soon(self._go)

    def to_writer(self) -> None:
        """From now on what waits is the writer's, until it waits for more."""
        if self._going is not None:
            self._going.cancel()
            self._going = None
        self._behind = True
        self._news.set()

    def _go(self) -> None:
        self._going = None
        left = True
        try:
            stream = self._stream
            if stream is not None and stream.has_room:
                early_s = self._pace.early_s()
                if early_s > 0.0:
                    self._going = self._loop.call_later(early_s, self._go)
                    return
                self._pace.went()
                left = self._send(stream)
        except Exception as error:
            self._failure = error
        if left:
            self.to_writer()

    # -- what the writer asks for

    async def news(self) -> None:
        """Wait, as the writer that has nothing: what comes goes past it while that is possible."""
        self._behind = False
        self._news.clear()
        await self._news.wait()

    def check(self) -> None:
        """Raises what broke off the sending."""
        if self._failure is not None:
            raise self._failure
