"""Bytes on a pipe. A parent sees by them that a process's event loop runs, and the process that its parent lives on.

A port would not do: strangers who fill a process's ports would make it look hung."""

from __future__ import annotations

import asyncio
import os
from typing import Final

BEAT_S: Final = 0.5
"""Seconds between two beats."""


class Heartbeat:
    """The heartbeat of this process: ``start`` → ``close``."""

    def __init__(self, fd: int) -> None:
        """Takes the pipe's end ``fd``, which :meth:`close` closes; negative if nobody listens."""
        self._fd = fd
        self._next: asyncio.TimerHandle | None = None
        self.orphaned = asyncio.Event()
        """Set once nobody listens any more."""

    def start(self) -> None:
        if self._fd >= 0:
            os.set_blocking(self._fd, False)
            self._beat()

    def _beat(self) -> None:
        self.look()
        if not self.orphaned.is_set():
            self._next = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def look(self) -> None:
        """Sends a beat, and sets :attr:`orphaned` if nobody listens any more."""
        if self._fd < 0 or self.orphaned.is_set():
            return
        try:
            os.write(self._fd, b".")
        except BlockingIOError:  # the pipe is full, as the parent is slow
            pass
        except OSError:
            self.orphaned.set()

    async def alone(self, within_s: float) -> bool:
        """Returns whether nobody listens; waits ``within_s`` seconds for that."""
        self.look()
        if self.orphaned.is_set():
            return True
        try:
            await asyncio.wait_for(self.orphaned.wait(), within_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
