"""The spacing of messages: fewer and fuller ones under load, and no wait without load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pinyon.core.clock import Clock

EACH_S = 0.0001
MOST_S = 0.0015
# Timers of the loop have millisecond steps, so a shorter wait is not worth one.
LEAST_S = 0.0005


class Pace:
    """The gap between messages of one stream, which grows with the requests in flight: 0.1 ms for each, at most 1.5 ms.

    A message costs some 15 µs of CPU on each side, whatever it holds (:mod:`pinyon.runtime.http2`). Its making and
    reading cost as much again, so one every 1.5 ms takes some 2 % of a core. A single request never waits. With a dozen
    in flight, each waits a millisecond or so, and shares the message with the others.
    """

    def __init__(self, in_flight: Callable[[], int], clock: Clock) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._last_s = float("-inf")

    async def turn(self) -> None:
        """Waits until the next message is due; call it right before the message is put together."""
        early_s = self.early_s()
        if early_s > 0.0:
            await asyncio.sleep(early_s)
        self.went()

    def early_s(self) -> float:
        """Returns the seconds until the next message is due; 0 if it is."""
        gap_s = min(MOST_S, EACH_S * self._in_flight())
        early_s = self._last_s + gap_s - self._clock()
        return early_s if early_s > LEAST_S else 0.0

    def went(self) -> None:
        """Notes that a message is put together now."""
        self._last_s = self._clock()
