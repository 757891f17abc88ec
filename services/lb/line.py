"""The queue in front of everything: first come, first served, with a bound."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from pinyon.core.errors import ResourceExhausted

__all__ = ["Line"]

RETRY_AFTER_S = 1.0


class Line:
    """``slots`` requests are in flight at once, ``limit`` more wait. All on one event loop."""

    def __init__(self, slots: int, limit: int) -> None:
        self._slots = slots
        self._limit = limit
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self.in_flight = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Wait for a slot. Raises :class:`ResourceExhausted` at once when the queue is full. Cancel leaves no trace."""
        if self.in_flight < self._slots:  # then nobody waits: a slot that is left goes to the first in line
            self.in_flight += 1
            return
        if len(self._waiting) >= self._limit:
            raise ResourceExhausted(
                f"The queue is full ({self._limit} requests). Please try again later.", retry_after_s=RETRY_AFTER_S
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.pop(turn, None)
            else:  # the slot had just been given to us
                self.leave()
            raise

    def leave(self) -> None:
        """Give the slot to the first in line, or back."""
        while self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():  # done: cancelled, and its task has not run yet
                turn.set_result(None)
                return
        self.in_flight -= 1
