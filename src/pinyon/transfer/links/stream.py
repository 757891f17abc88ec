"""A blocking stream socket (TCP or Unix) whose every wait has an end.

Blocking calls with the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) and MSG_WAITALL move megabytes per system call
without the GIL. A timeout by ``socket.settimeout`` would add a poll and a trip through the interpreter per fragment."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, TypeVar

from pinyon.core.clock import Clock
from pinyon.transfer.links.spinner import Spinner
from pinyon.transfer.types.limits import TransferLimits

_TICKS_PER_STALL: Final = 4
"""Timeouts of the kernel in one stall limit. A stall is found 1 to 1.25 limits after the last byte.

It may be more than one limit because the call during which the peer froze returns first with what it had moved."""
_IOV_MAX: Final = 1024
_LITTLE_BYTES: Final = 256 << 10
_MIN_TIMEOUT_S: Final = 0.001
_WAIT_ALL: Final = int(socket.MSG_WAITALL)
_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)

_Buffer = TypeVar("_Buffer", bytes | memoryview, memoryview)


class Stalled(Exception):
    """The stream moved no byte for the stall limit."""


class DeadlineReached(Exception):
    """The operation's total deadline passed."""


class Stream:
    """A blocking socket. One thread uses a stream at a time; only ``abort`` and ``close`` may come from another."""

    def __init__(
        self, sock: socket.socket, limits: TransferLimits, clock: Clock = time.monotonic, *, polls: bool = True
    ) -> None:
        self.sock = sock
        """The socket, for others for what only it knows (its peer, its descriptor), not for moving bytes."""
        self._timeouts: tuple[type[OSError], ...] = (BlockingIOError,)
        """The errors that a call raises when its tick ends without a byte."""
        self._clock = clock
        self._buffer_bytes = limits.socket_buffer_bytes
        self._little = False
        self._tick_s = limits.stall_s / _TICKS_PER_STALL
        self._armed_s = 0.0
        self._quiet = 0
        self.poll = Spinner(sock, limits.spin_s if polls else 0.0, clock).poll
        """A function, ``Spinner.poll``: how many bytes came within the polling time; 0: the peer closed; None: none."""
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._set_buffers(self._buffer_bytes)

    def _arm(self, deadline: float) -> None:
        """Makes a call that may block return at the next tick, or at the deadline if that is sooner.

        Far from the deadline it is always the tick, so callers first check themselves whether there is anything to do.
        Raises DeadlineReached."""
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise DeadlineReached
        timeout = min(self._tick_s, max(remaining, _MIN_TIMEOUT_S))
        if timeout != self._armed_s:
            self._set_timeout(timeout)
            self._armed_s = timeout

    def _set_timeout(self, timeout: float) -> None:
        seconds = int(timeout)
        value = struct.pack("@ll", seconds, int((timeout - seconds) * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _no_progress(self) -> None:
        # A short last tick before the deadline counts as a whole one; the deadline itself is checked first.
        self._quiet += 1
        if self._quiet >= _TICKS_PER_STALL:
            raise Stalled

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float, quiet: int = 0) -> None:
        """Sends all bytes of all buffers; there were ``quiet`` ticks without a byte before.

        Raises Stalled, DeadlineReached, OSError."""
        rest = buffers
        left = sum(map(len, buffers))
        self._quiet = quiet
        while left:
            if deadline - self._clock() < self._tick_s or self._armed_s != self._tick_s:
                self._arm(deadline)
            try:
                moved = self._send_some(rest)
            except self._timeouts:
                self._no_progress()
                continue
            left -= moved
            if left:
                self._quiet = 0
                rest = _after(rest, moved)

    def _send_some(self, rest: Sequence[bytes | memoryview]) -> int:
        return self.sock.sendmsg(rest if len(rest) <= _IOV_MAX else rest[:_IOV_MAX])

    def send_one(self, buffer: bytes | memoryview, deadline: float) -> None:
        """Sends like :meth:`send`, for a buffer that usually goes in one call."""
        if deadline - self._clock() < self._tick_s or self._armed_s != self._tick_s:
            self._arm(deadline)
        try:
            moved = self.sock.send(buffer)
        except self._timeouts:
            self.send((buffer,), deadline, 1)
            return
        if moved != len(buffer):
            self.send((memoryview(buffer)[moved:],), deadline)

    def receive(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """Fills all buffers, straight from the socket.

        Raises Stalled, DeadlineReached, OSError (``ConnectionResetError`` when the peer closed)."""
        rest = buffers
        left = sum(map(len, buffers))
        self._quiet = 0
        while left:
            if deadline - self._clock() < self._tick_s or self._armed_s != self._tick_s:
                self._arm(deadline)
            try:
                moved = self._receive_some(rest)
            except self._timeouts:
                self._no_progress()
                continue
            if not moved:
                raise ConnectionResetError("the peer closed the connection")
            left -= moved
            if left:
                self._quiet = 0
                rest = _after(rest, moved)

    def receive_bytes(self, count: int, deadline: float) -> bytes:
        """Returns exactly ``count`` bytes. Raises like :meth:`receive`."""
        data = bytearray(count)
        self.receive([memoryview(data)], deadline)
        return bytes(data)

    def _receive_some(self, rest: Sequence[memoryview]) -> int:
        if len(rest) == 1:
            return self.sock.recv_into(rest[0], 0, _WAIT_ALL)
        window = rest if len(rest) <= _IOV_MAX else rest[:_IOV_MAX]
        return self.sock.recvmsg_into(window, 0, _WAIT_ALL)[0]

    def keep_little(self) -> None:
        """Keeps socket buffers small from now on if both ends are on this host.

        There nothing is on its way for long, and bytes that wait in large buffers have left the core's cache before
        they are taken out (docs/notebook/transfer.md). Not for ends that do more with the bytes than move them: large
        buffers keep both busy then. Only while nothing is on its way to us: it might find no room and have to be sent
        again."""
        if self._little:
            return
        self._little = True
        if _stays_here(self.sock):
            self._set_buffers(min(self._buffer_bytes, _LITTLE_BYTES))

    def _set_buffers(self, nbytes: int) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)

    def waits_itself(self) -> None:
        """Makes calls wait again after an event loop has watched the socket; some (uvloop) leave it non-blocking."""
        os.set_blocking(self.sock.fileno(), True)

    def receive_now(self, buffer: memoryview) -> int | None:
        """Receives without waiting; returns the byte count, 0 if the peer closed, None for nothing. Raises OSError."""
        try:
            return self.sock.recv_into(buffer, 0, _DONT_WAIT)
        except BlockingIOError:
            return None

    def peek(self, count: int, deadline: float) -> bytes:
        """Returns ``count`` bytes, fewer if the peer closed, and leaves them. Raises like :meth:`send`."""
        self._quiet = 0
        while True:
            self._arm(deadline)
            try:
                return self.sock.recv(count, socket.MSG_PEEK | socket.MSG_WAITALL)
            except self._timeouts:
                self._no_progress()

    def receive_some(self, buffer: memoryview, least: int, deadline: float) -> int:
        """Receives ``least`` bytes or more of an answer that is expected any moment, so it is polled for first.

        Returns their number. Raises like :meth:`receive`."""
        moved = self.poll(buffer)
        if moved is None:
            moved = self._sleep(buffer, deadline, stall=True)
        if not moved:
            raise ConnectionResetError("the peer closed the connection")
        if moved < least:
            self.receive([buffer[moved:least]], deadline)
            return least
        return moved

    def await_some(self, buffer: memoryview, deadline: float) -> int:
        """Receives what comes next; returns the number of bytes, 0 if the peer closed or the deadline passed."""
        try:
            return self._sleep(buffer, deadline, stall=False)
        except DeadlineReached:
            return 0

    def _sleep(self, buffer: memoryview, deadline: float, *, stall: bool) -> int:
        """Receives what comes first; returns the number of bytes, 0 if the peer closed."""
        self._quiet = 0
        while True:
            self._arm(deadline)
            try:
                moved = self.sock.recv_into(buffer)
            except self._timeouts:
                if stall:
                    self._no_progress()
                continue
            return moved

    def abort(self) -> None:
        """Wakes the thread blocked on this stream, which gets an ``OSError``. From any thread, any number of times."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self, *, hard: bool) -> None:
        """Closes it; ``hard`` drops our send buffer, so that a failed WRITE does not trickle on after its status."""
        if hard:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def _stays_here(sock: socket.socket) -> bool:
    """Returns whether both ends are on this host: they have the same address then, of loopback or another interface."""
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # the peer is gone already
        return False


def _after(buffers: Sequence[_Buffer], moved: int) -> list[_Buffer]:
    """Returns what is left of ``buffers`` after their first ``moved`` bytes."""
    for position, buffer in enumerate(buffers):
        size = len(buffer)
        if moved < size:
            rest = list(buffers[position:])
            rest[0] = memoryview(buffer)[moved:]
            return rest
        moved -= size
    return []
