"""Readiness: whether requests would be served now, for health checks and for people."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

LOOK_S = 0.5

_log = get_logger("lb")


class Watched(Protocol):
    """The part of the load balancer that serves the requests."""

    def lacks(self) -> str:
        """Returns why no request for any model would be served, for people; empty if one would be."""
        ...

    def unserved(self) -> dict[str, str]:
        """Returns the models whose requests would not be served, and why, a sentence each."""
        ...

    async def look(self) -> None:
        """Finds out about changes that nobody reports."""
        ...

    async def wait_change(self, timeout_s: float) -> None:
        """Waits until readiness may have changed, at most ``timeout_s``."""
        ...


class Readiness:
    """The readiness of the load balancer: ``start`` → ``lacks`` at any time → ``close``."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.draining = False
        """True once the process is about to end: it is not ready, but requests that run, or still come, are served."""
        self._task: asyncio.Task[None] | None = None

    def lacks(self) -> str:
        """Returns why no request for any model would be served, for people; empty if one would be."""
        return "The load balancer is about to end: draining." if self.draining else self.watched.lacks()

    def start(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Starts to call ``tell`` at each change."""
        self._task = asyncio.create_task(self._watch(tell), name="readiness")

    async def close(self) -> None:
        await ended(self._task)

    async def _watch(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        told: bool | None = None
        while True:
            try:
                await self.watched.look()
                missing = self.lacks()
                if told is not (not missing):
                    await tell(not missing)
                    told = not missing
                    _log.info("ready" if told else f"not ready: {missing}")
            except Exception:
                _log.exception("who is there cannot be found out")
                await asyncio.sleep(LOOK_S)
            await self.watched.wait_change(LOOK_S)
