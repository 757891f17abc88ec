"""The sending of messages that wait for a stream, at the end of the event loop's turn or as soon as the pace allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pinyon.runtime.duplex import Duplex
from pinyon.runtime.pace import Pace


class TurnEnd:
    """The sender of an owner's waiting messages, which wakes no task as long as the peer takes them.

    Otherwise the stream's writer sends them. All runs on one event loop. The owner keeps the messages, and calls
    :meth:`come` when there is one.
    """

    def __init__(self, pace: Pace, send: Callable[[Duplex[Any, Any]], bool]) -> None:
        """Takes ``send``, which pushes messages as far as the stream takes them, and returns whether some are left.

        An error of ``send`` ends the stream, by the writer."""
        self._pace = pace
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._stream: Duplex[Any, Any] | None = None
        self._going: asyncio.Handle | None = None
        self._behind = True
        """True while the waiting messages are the writer's."""
        self._news = asyncio.Event()
        """Set when there are messages for the writer."""
        self._failure: Exception | None = None

    def by(self, stream: Duplex[Any, Any] | None) -> None:
        """Lets messages go past the writer, by this stream; None ends that."""
        self._stream = stream

    def come(self) -> None:
        """Notes that a message waits."""
        if self._behind:
            self._news.set()
        elif self._going is None:
            self._going = self._loop.call_soon(self._go)

    def to_writer(self) -> None:
        """Leaves the waiting messages to the writer, until it waits for more."""
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

    # -- for the writer

    async def news(self) -> None:
        """Waits for messages for the writer; meanwhile they go past the writer if possible."""
        self._behind = False
        self._news.clear()
        await self._news.wait()

    def check(self) -> None:
        """Raises the error that ended the sending, if any."""
        if self._failure is not None:
            raise self._failure
