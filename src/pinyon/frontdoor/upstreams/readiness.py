"""Whether a request would be served now, where other people's servers serve it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from pinyon.frontdoor.upstreams.fleet import Fleet
from pinyon.runtime.logging import get_logger

__all__ = ["UpstreamReadiness"]

LOOK_S = 0.5

_log = get_logger("lb.upstreams")


class UpstreamReadiness:
    """``start`` → ``lacks`` at any time → ``close``. ``tell`` hears each change, ``draining`` outdoes everything."""

    def __init__(self, fleet: Fleet, tell: Callable[[bool], Awaitable[None]], draining: Callable[[], bool]) -> None:
        self._fleet = fleet
        self._tell = tell
        self._draining = draining
        self._told: bool | None = None
        self._task: asyncio.Task[None] | None = None

    def lacks(self) -> str:
        """A sentence; empty: some model is served."""
        if self._draining():
            return "The server is shutting down."
        if any(served.live for served in self._fleet.models.values()):
            return ""
        # Where they are is nobody's business who may ask for this.
        reasons = sorted({server.lacks or "it is left out, as it failed" for server in self._fleet.servers.values()})
        return f"No server behind the load balancer can be used: {'; '.join(reasons[:4])}."

    def missing(self) -> dict[str, str]:
        """Models of which no request would be served, and why."""
        return {
            name: f"No server of the model '{name}' is there."
            for name, served in self._fleet.models.items()
            if not served.live
        }

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="readiness")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                _log.exception("whether it is ready cannot be told")
            await self._fleet.wait_news(LOOK_S)

    async def _look(self) -> None:
        missing = self.lacks()
        if self._told is not (not missing):
            await self._tell(not missing)
            self._told = not missing
            _log.info("ready" if not missing else f"not ready: {missing}")
