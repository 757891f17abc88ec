"""Fewer and fuller messages under load, and no wait without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pinyon.core.clock import Clock

__all__ = ["Pace"]

EACH_S = 0.0004
MOST_S = 0.006
# Timers of the loop have millisecond steps: less is not worth one.
LEAST_S = 0.0005


class Pace:
    """Spaces the messages of one stream by a gap that grows with what is in flight: 0.4 ms for each, at most 6 ms.

    A gRPC message costs some 100 µs of CPU on each side, whatever it holds. A single request never waits; with dozens
    in flight, each waits a few milliseconds at most and shares the message with the others.
    """

    def __init__(self, in_flight: Callable[[], int], clock: Clock) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._last_s = float("-inf")

    async def turn(self) -> None:
        """Wait until the next message is due; call it right before the message is put together."""
        gap_s = min(MOST_S, EACH_S * self._in_flight())
        early_s = self._last_s + gap_s - self._clock()
        if early_s > LEAST_S:
            await asyncio.sleep(early_s)
        self._last_s = self._clock()
