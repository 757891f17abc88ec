"""A blocking TCP socket whose every wait has an end.

Blocking calls with the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) and MSG_WAITALL move megabytes per system call
without the GIL; ``socket.settimeout`` would add a poll and a trip through the interpreter per fragment.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence

__all__ = ["DeadlineReached", "Pulse", "Stalled", "Stream"]

_TICKS_PER_STALL = 4
"""The kernel's timeout is this fraction of the stall limit: a stall is found between 1 and 1.25 limits after the last
byte, because the call during which the peer froze returns first with what it had moved."""
_IOV_MAX = 1024
_MIN_TIMEOUT_S = 0.001

Buffers = Sequence[memoryview]


class Stalled(Exception):
    """No byte moved for the stall limit."""


class DeadlineReached(Exception):
    """The operation's total deadline passed."""


class Pulse:
    """When bytes last moved on any of the streams that share it."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = time.monotonic()


class Stream:
    """One thread uses a stream at a time; only ``abort`` may be called from another."""

    def __init__(self, sock: socket.socket, stall_s: float, buffer_bytes: int) -> None:
        self._sock = sock
        self._ticks = _TICKS_PER_STALL
        self._tick_s = stall_s / _TICKS_PER_STALL
        self._armed_s = 0.0
        self._quiet = 0
        self.pulse = Pulse()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)

    def _arm(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineReached
        timeout = min(self._tick_s, max(remaining, _MIN_TIMEOUT_S))
        if timeout != self._armed_s:  # far from the deadline it is always the tick: no system call
            seconds = int(timeout)
            value = struct.pack("@ll", seconds, int((timeout - seconds) * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._armed_s = timeout

    def _no_progress(self) -> None:
        # A short last tick before the deadline counts as a whole one; the deadline itself is checked first.
        self._quiet += 1
        if self._quiet >= self._ticks:
            raise Stalled

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all bytes of all buffers.

        Raises:
            Stalled, DeadlineReached, OSError
        """
        rest = [memoryview(buffer) for buffer in buffers]
        self._quiet = 0
        while rest:
            self._arm(deadline)
            try:
                moved = self._sock.sendmsg(rest if len(rest) <= _IOV_MAX else rest[:_IOV_MAX])
            except BlockingIOError:
                self._no_progress()
                continue
            self._quiet = 0
            self.pulse.at = time.monotonic()
            rest = _after(rest, moved)

    def receive(self, buffers: Buffers, deadline: float) -> None:
        """Fill all buffers, straight from the socket.

        Raises:
            Stalled, DeadlineReached, OSError (``ConnectionResetError`` when the peer closed)
        """
        rest = list(buffers)
        self._quiet = 0
        while rest:
            self._arm(deadline)
            try:
                moved = self._receive_some(rest)
            except BlockingIOError:
                self._no_progress()
                continue
            if not moved:
                raise ConnectionResetError("the peer closed the connection")
            self._quiet = 0
            self.pulse.at = time.monotonic()
            rest = _after(rest, moved)

    def _receive_some(self, rest: list[memoryview]) -> int:
        if len(rest) == 1:
            return self._sock.recv_into(rest[0], 0, socket.MSG_WAITALL)
        window = rest if len(rest) <= _IOV_MAX else rest[:_IOV_MAX]
        return self._sock.recvmsg_into(window, 0, socket.MSG_WAITALL)[0]

    def receive_or_idle(self, buffer: memoryview, deadline: float) -> bool:
        """Fill ``buffer`` like :meth:`receive`, but nothing at all until ``deadline`` is no error.

        Returns:
            False when the peer closed in good order or the deadline passed before the first byte.
        """
        while True:
            try:
                self._arm(deadline)
                moved = self._receive_some([buffer])
                break
            except BlockingIOError:
                continue
            except DeadlineReached:
                return False
        if not moved:
            return False
        if moved < len(buffer):
            self.receive([buffer[moved:]], deadline)
        return True

    def abort(self) -> None:
        """Wake whoever is blocked on this stream; it gets an ``OSError``. From any thread, any number of times."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self, *, hard: bool) -> None:
        """``hard``: drop what is in our send buffer, so that a failed WRITE does not trickle on after its status."""
        if hard:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


def _after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of ``buffers`` after their first ``moved`` bytes."""
    for position, buffer in enumerate(buffers):
        size = len(buffer)
        if moved < size:
            rest = buffers[position:]
            rest[0] = buffer[moved:]
            return rest
        moved -= size
    return []
