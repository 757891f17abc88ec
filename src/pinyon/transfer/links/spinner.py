"""Polling of a socket for a moment before sleeping on it.

A core that sleeps takes longer to wake than a small transfer takes, 100 µs on some virtual machines, and the thread
that wakes it pays as well. So after a request the next bytes are polled for, for a bounded time. The gain is large only
if both ends of a link do so (docs/notebook/transfer.md), so neither can find out by comparing its own waits. A link
polls unless it is idle, or cores are short. Where they are, a sleeper that is woken gets its core sooner than one that
polls and yields. That shows in a single look at the socket that takes longer than all the polling may."""

from __future__ import annotations

import ctypes
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from pinyon.core.clock import Clock
from pinyon.transfer.host.process import available_cores

_IDLE_MOST: Final = 6
"""Bound of n: after n waits in a row that were longer than the polling, the next 2^n waits sleep at once.

A pause among many requests costs next to nothing, and an idle link polls at one wait of 65. Of waits that alternate it
polls for each kind in turn, since its polls are 2^n + 1 waits apart."""
_REST_EVERY: Final = 128
"""Number of waits ended by polling after which one sleeps: a link at rest can be closed to make room for another."""
_LOST_SHARE: Final = 0.05
"""The largest share of time that polling may lose to others that want the core."""
_LOST_MOST_S: Final = 0.05
"""Largest time that one loss counts: the process may have been stopped, or its machine."""
_FOREVER: Final = 1 << 62
_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)


_seats: deque[None] = deque([None] * (available_cores() // 2))
"""Seats, one per thread that may poll at a time (none on a single core). ``pop`` and ``append`` are atomic."""

# Not os.sched_yield, which keeps the GIL. The yield matters: a peer that waits for this very core gets it at once, and
# while it runs the kernel moves one of the two to an idle core.
_libc = ctypes.CDLL(None)
_yield: Final[Callable[[], int]] = _libc.sched_yield if hasattr(_libc, "sched_yield") else lambda: 0


class Spinner:
    """The polling of one link."""

    __slots__ = ("_asleep", "_clock", "_idle", "_limit_s", "_receive", "_resting_until_s", "_seats", "_succeeded")

    def __init__(
        self, sock: socket.socket, limit_s: float, clock: Clock = time.monotonic, seats: deque[None] = _seats
    ) -> None:
        """Polls for no longer than ``limit_s``; 0 never polls. ``seats`` has one entry per thread that may poll."""
        self._receive = sock.recv_into
        self._clock = clock
        self._seats = seats
        self._limit_s = limit_s
        self._asleep = 0 if limit_s > 0 else _FOREVER
        """Number of coming waits that sleep at once."""
        self._idle = 0
        self._resting_until_s = 0.0
        """The time until which waits sleep, because a core was lost."""
        self._succeeded = 0

    def poll(self, buffer: memoryview) -> int | None:
        """Returns the number of bytes received into ``buffer`` (0: the peer closed); None to sleep. Raises OSError."""
        if self._asleep:
            self._asleep -= 1
            return None
        return self._poll(buffer)

    def _poll(self, buffer: memoryview) -> int | None:
        clock, limit_s, seats = self._clock, self._limit_s, self._seats
        looked = clock()
        if looked < self._resting_until_s:
            return None
        try:
            seats.pop()
        except IndexError:
            return None
        try:
            receive = self._receive
            moved: int | None
            end = looked + limit_s
            while True:
                _yield()
                try:
                    moved = receive(buffer, 0, _DONT_WAIT)
                except BlockingIOError:
                    moved = None
                now = clock()
                if now - looked > limit_s:
                    self._resting_until_s = now + min(now - looked, _LOST_MOST_S) / _LOST_SHARE
                    return moved
                if moved is not None:
                    self._idle = 0
                    self._succeeded += 1
                    if self._succeeded == _REST_EVERY:
                        self._succeeded = 0
                        self._asleep = 1
                    return moved
                if now >= end:
                    self._idle = min(self._idle + 1, _IDLE_MOST)
                    self._asleep = 1 << self._idle
                    return None
                looked = now
        finally:
            seats.append(None)
