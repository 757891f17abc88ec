"""The times at which a load balancer is told of the load: on changes, not too often, and regularly in any case.

An unchanged load is told as well, so that silence means that the instance is frozen or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock

HEARTBEAT_S = 0.5
"""The longest time in s between equal messages, unless the session's interval is longer."""
EARLY_S = 0.001
"""The precision of the event loop's timers, which may be early by a millisecond."""


class LoadNews:
    """The news of one session; ``read`` returns the load, at most once per ``interval_s`` unless something is told.

    ``start`` → ``close``: a timer calls ``wake`` when something is to be told and no message is on its way. The code
    that composes a message calls :meth:`take`."""

    def __init__(
        self, read: Callable[[], worker_pb2.Load], interval_s: float, wake: Callable[[], None], clock: Clock
    ) -> None:
        self._read = read
        self._interval_s = interval_s
        self._wake = wake
        self._clock = clock
        self._heartbeat_s = max(HEARTBEAT_S, interval_s)
        self._early_s = min(self._heartbeat_s / 2, self._heartbeat_s - interval_s)
        self._told = worker_pb2.Load()
        self._beat_s = 0.0
        """The latest time of the next message."""
        self._timer: asyncio.TimerHandle | None = None
        self.next_s = 0.0
        """The earliest time at which the load is read again."""
        self.due = True
        """True if something is to be told."""

    def start(self) -> None:
        """Looks for news now and by a timer, until it is closed."""
        now_s = self._clock()
        if self.look(now_s):
            self._wake()
        delay_s = max(EARLY_S, self.next_s - now_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.start)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self, now_s: float, *, going: bool = False) -> bool:
        """Returns whether to tell the load now. With ``going``, a message goes anyway, and takes a load due soon."""
        if going and now_s >= self._beat_s - self._early_s:
            self.due = True
        if now_s >= self.next_s - EARLY_S:
            self.next_s = now_s + self._interval_s
            if not self.due and now_s < self._beat_s - EARLY_S and self._now() == self._told:
                self.next_s = min(self.next_s, self._beat_s)
            else:
                self.due = True
        return self.due

    def tell(self, now_s: float) -> worker_pb2.Load:
        """Returns the present load and counts it as told."""
        self._told.seq += 1
        self._told = load = self._now()
        self._beat_s = now_s + self._heartbeat_s
        self.next_s = now_s + self._interval_s
        self.due = False
        return load

    def _now(self) -> worker_pb2.Load:
        """Returns the load with the number of the last one that was told."""
        load = self._read()
        load.seq = self._told.seq
        return load

    def take(self) -> worker_pb2.Load | None:
        """Returns the load to go with the message that is sent now; None: no load."""
        now_s = self._clock()
        return self.tell(now_s) if self.look(now_s, going=True) else None
