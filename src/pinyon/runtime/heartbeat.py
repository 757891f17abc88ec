"""How a parent sees that a process's event loop runs, and the process that its parent does: bytes on a pipe of theirs.

No port: strangers who fill those of a process do not make it look hung.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

BEAT_S: Final = 0.5
"""Between two."""


class Heartbeat:
    """Of this process: ``start`` → ``close``."""

    def __init__(self, fd: int) -> None:
        """``fd`` is the pipe's end, and closed at last; negative: nobody is interested."""
        self._fd = fd
        self._next: asyncio.TimerHandle | None = None
        self.orphaned = asyncio.Event()
        """Nobody listens any more."""

    def start(self) -> None:
        if self._fd >= 0:
            os.set_blocking(self._fd, False)
            self._beat()

    def _beat(self) -> None:
        self.look()
        if not self.orphaned.is_set():
            self._next = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def look(self) -> None:
        """Whether somebody listens now."""
        if self._fd < 0 or self.orphaned.is_set():
            return
        try:
            os.write(self._fd, b".")
        except BlockingIOError:  # it is full: somebody is slow
            pass
        except OSError:
            self.orphaned.set()

    async def alone(self, within_s: float) -> bool:
        """Whether nobody listens; waits so long for that."""
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
