"""Those who wait in the queue, as futures; who goes on is :class:`RequestQueue`'s decision."""

from __future__ import annotations

import asyncio
import time

from pinyon.core.clock import Clock
from pinyon.routing.queue import RequestQueue

__all__ = ["Line"]


class Line:
    """All on one event loop."""

    def __init__(self, queue: RequestQueue, clock: Clock = time.monotonic) -> None:
        self._queue = queue
        self._clock = clock
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._last = 0

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    @property
    def queued(self) -> int:
        return self._queue.queued

    async def enter(self) -> None:
        """Wait for a slot. Raises :class:`ResourceExhausted` at once when the queue is full. Cancel leaves no trace."""
        self._last = number = self._last + 1
        if self._queue.enter(number, self._clock()):
            return
        turn = self._turns[number] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if not self._queue.cancel(number, self._clock()):  # the slot had just been given to us
                self.leave()
            raise
        finally:
            del self._turns[number]

    def leave(self) -> None:
        """Give the slot to the first in line, or back."""
        number = self._queue.leave(self._clock())
        if number is not None and not (turn := self._turns[number]).done():  # done: cancelled, its task will pass it on
            turn.set_result(None)
