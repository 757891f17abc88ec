"""When one load balancer is told of the load: when it has changed, not too often, and in any case now and then.

What never changes is told as well, so that silence means that the instance is frozen or gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock

HEARTBEAT_S = 0.5
"""Between two that say the same, at most; or the session's interval, if that is longer."""
EARLY_S = 0.001
"""The event loop's timers have millisecond steps, and may be early by one."""


class LoadNews:
    """Of one session. ``read`` says the load; it is not asked twice within ``interval_s``, unless something is told."""

    def __init__(self, read: Callable[[], worker_pb2.Load], interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._heartbeat_s = max(HEARTBEAT_S, interval_s)
        self._early_s = min(self._heartbeat_s / 2, self._heartbeat_s - interval_s)
        self._told: worker_pb2.Load | None = None
        self._beat_s = 0.0
        """Something is told then at the latest."""
        self.next_s = 0.0
        """Before this nothing new is looked for."""
        self.due = True
        """Something is to be told."""

    def look(self, now_s: float, *, going: bool = False) -> bool:
        """Whether something is to be told now. ``going``: a message goes, and takes what would need its own soon."""
        if going and now_s >= self._beat_s - self._early_s:
            self.due = True
        if now_s >= self.next_s - EARLY_S:
            self.next_s = now_s + self._interval_s
            if not self.due and now_s < self._beat_s - EARLY_S and self._read() == self._told:
                self.next_s = min(self.next_s, self._beat_s)
            else:
                self.due = True
        return self.due

    def tell(self, now_s: float) -> worker_pb2.Load:
        """As of now. It is told to the session."""
        self._told = load = self._read()
        self._beat_s = now_s + self._heartbeat_s
        self.next_s = now_s + self._interval_s
        self.due = False
        return load


class LoadTeller:
    """:class:`LoadNews` with a timer that calls ``wake`` when something is to be told and no message is on its way.
    Whoever puts a message together asks :meth:`take`."""

    def __init__(self, news: LoadNews, wake: Callable[[], None], clock: Clock) -> None:
        self._news = news
        self._wake = wake
        self._clock = clock
        self._seq = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def take(self) -> worker_pb2.Load | None:
        """What goes with the message that is sent now; None: nothing."""
        now_s = self._clock()
        if not self._news.look(now_s, going=True):
            return None
        load = self._news.tell(now_s)
        self._seq += 1
        message = worker_pb2.Load(seq=self._seq)
        message.MergeFrom(load)
        return message

    def _look(self) -> None:
        now_s = self._clock()
        if self._news.look(now_s):
            self._wake()
        delay_s = max(EARLY_S, self._news.next_s - now_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
