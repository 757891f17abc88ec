"""Polling a socket for a moment before sleeping on it.

A core that sleeps takes longer to wake (50 to 100 µs on a virtual machine) than a small transfer takes. So after a
request the next bytes are polled for, for a bounded time. Whether that pays is measured: where cores are short, a
sleeper that is woken gets its core sooner than one that polls and yields; and who polls on an idle link burns time for
nothing. So each link compares how long its waits take either way, does what is quicker, and now and then the other.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from pinyon.core.clock import Clock
from pinyon.transfer.host.cores import available_cores

__all__ = ["Spinner"]

_BETTER: Final = 0.8
"""Polling has to be quicker than sleeping by this factor, since it burns a core."""
_WEIGHT: Final = 0.25
"""Of the newest wait in the running means."""
_LONG_S: Final = 2e-3
"""Who waited longer than this waited for nothing in particular: it says nothing about sleeping, and against polling."""
_GUESS_S: Final = 100e-6
"""What a wait takes asleep, until it is known."""
_SLEEP_EVERY: Final = 128
"""While polling pays: so often it sleeps all the same, to compare."""
_POLL_EVERY: Final = (16, 256)
"""While it does not: so often it polls all the same, less and less often."""
_MEASURED: Final = 4
"""While it does not: so many waits before the next poll are timed, the others cost nothing."""
_FOREVER: Final = 1 << 62
_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)


_seats: deque[None] = deque([None] * (available_cores() // 2))
"""One per thread of the process that may poll at a time (none on a single core). ``pop`` and ``append`` are atomic."""

# Not os.sched_yield, which keeps the GIL. The yield matters: a peer that waits for this very core gets it at once, and
# while it runs the kernel moves one of the two to an idle core.
_libc = ctypes.CDLL(None)
_yield: Final[Callable[[], int]] = _libc.sched_yield if hasattr(_libc, "sched_yield") else lambda: 0


class Spinner:
    """One link's."""

    __slots__ = (
        "_asleep_s",
        "_began",
        "_clock",
        "_every",
        "_left",
        "_limit_s",
        "_polled",
        "_polling_s",
        "_polls",
        "_receive",
        "_seats",
        "_timed",
        "_waited_s",
    )

    def __init__(
        self, sock: socket.socket, limit_s: float, clock: Clock = time.monotonic, seats: deque[None] = _seats
    ) -> None:
        """``limit_s``: polls take no longer than this; 0 never polls. ``seats``: one per thread that may poll."""
        self._receive = sock.recv_into
        self._clock = clock
        self._seats = seats
        self._limit_s = limit_s
        self._polling_s = 0.0
        """How long waits take that begin with polling."""
        self._asleep_s = _GUESS_S
        self._every = _POLL_EVERY[0]
        self._polls = limit_s > 0
        """Polling pays, as far as is known."""
        self._left = _SLEEP_EVERY if limit_s else _FOREVER
        """Waits until the other way is tried."""
        self._began = 0.0
        self._polled = False
        """The last wait that was timed began with polling."""
        self._timed = False
        """``slept`` is to learn from the wait that is under way."""
        self._waited_s = -1.0

    def poll(self, buffer: memoryview) -> int | None:
        """Bytes received into ``buffer`` (0: the peer closed); None: sleep for them, and call ``slept`` after.

        Raises:
            OSError
        """
        self._left -= 1
        if self._left >= _MEASURED and not self._polls:
            return None
        return self._poll(buffer)

    def _poll(self, buffer: memoryview) -> int | None:
        clock, seats = self._clock, self._seats
        if self._waited_s >= 0.0:  # of the last poll: learnt from now, when there is time
            self._learn(self._waited_s)
            self._waited_s = -1.0
        self._began = began = clock()
        other = self._left <= 0
        self._polled = self._polls is not other
        self._timed = True
        if other:
            self._left = _SLEEP_EVERY if self._polls else self._every
        if not self._polled:
            return None
        try:
            seats.pop()
        except IndexError:
            self._timed = False  # neither way
            return None
        try:
            receive, end = self._receive, began + self._limit_s
            while True:
                _yield()
                try:
                    moved = receive(buffer, 0, _DONT_WAIT)
                except BlockingIOError:
                    if clock() >= end:
                        return None
                else:
                    self._waited_s = clock() - began
                    self._timed = False
                    return moved
        finally:
            seats.append(None)

    def slept(self) -> None:
        """The bytes that ``poll`` did not get have come."""
        if self._timed:
            self._timed = False
            self._learn(self._clock() - self._began)

    def _learn(self, waited_s: float) -> None:
        if self._polled:
            self._polling_s += _WEIGHT * (min(waited_s, _LONG_S) - self._polling_s)
        elif waited_s < _LONG_S:
            self._asleep_s += _WEIGHT * (waited_s - self._asleep_s)
        pays = self._polling_s < _BETTER * self._asleep_s
        if self._polled:
            self._every = _POLL_EVERY[0] if pays else min(2 * self._every, _POLL_EVERY[1])
        if pays is not self._polls:
            self._polls = pays
            self._every = _POLL_EVERY[0]
            self._left = _SLEEP_EVERY if pays else self._every
