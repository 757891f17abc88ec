"""Whether requests would be served now, for health checks and for people."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

LOOK_S = 0.5

_log = get_logger("lb")


class Watched(Protocol):
    """What serves the requests."""

    def lacks(self) -> str:
        """Why no request for any model would be served, for people; empty if one would be."""
        ...

    def unserved(self) -> dict[str, str]:
        """Models of which no request would be served, and why, a sentence each."""
        ...

    async def look(self) -> None:
        """Finds out what nobody tells."""
        ...

    async def wait_change(self, timeout_s: float) -> None:
        """Until it may have changed, or so long."""
        ...


class Readiness:
    """``start`` → ``lacks`` at any time → ``close``."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.draining = False
        """The process is about to end: it is not ready, and what runs, and comes all the same, still runs."""
        self._told: bool | None = None
        self._task: asyncio.Task[None] | None = None

    def lacks(self) -> str:
        """Why no request for any model would be served, for people; empty if one would be."""
        return "The load balancer is about to end: draining." if self.draining else self._watched.lacks()

    def unserved(self) -> dict[str, str]:
        """Models of which no request would be served, and why, a sentence each."""
        return self._watched.unserved()

    def start(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """``tell`` hears each change."""
        self._task = asyncio.create_task(self._watch(tell), name="readiness")

    async def close(self) -> None:
        await ended(self._task)

    async def _watch(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        while True:
            try:
                await self._watched.look()
                await self._say(tell)
            except Exception:
                _log.exception("who is there cannot be found out")
                await asyncio.sleep(LOOK_S)
            await self._watched.wait_change(LOOK_S)

    async def _say(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        missing = self.lacks()
        if self._told is not (not missing):
            await tell(not missing)
            self._told = not missing
            _log.info("ready" if not missing else f"not ready: {missing}")
