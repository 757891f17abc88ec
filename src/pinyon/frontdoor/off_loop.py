"""Threads for work that would hold up the event loop, with a bound on the work that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pinyon.core.errors import Unavailable
from pinyon.http.budget import Budget

THREADS = 2
WAITING_MAX = 256

Result = TypeVar("Result")


class OffLoop:
    """A pool of threads; ``close`` waits for running work. Work in here must not keep the GIL for long at a time."""

    def __init__(self, threads: int = THREADS, waiting_max: int = WAITING_MAX, what: str = "large requests") -> None:
        """Creates the threads. ``what`` names the work to clients that are told that there is too much of it."""
        self._what = what
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="off-loop")
        self._places = Budget(threads + waiting_max)

    async def run(self, name: str, work: Callable[..., Result], *arguments: object) -> Result:
        """Runs ``work`` in a thread and returns its result, counted against the client ``name`` (empty: against none).

        Raises :class:`Unavailable` when too much waits, of this client or of all, and what ``work`` raises."""
        if not self._places.take(1, name):
            raise Unavailable(f"Too many {self._what} are being read.", retry_after_s=1.0)
        future = self._threads.submit(work, *arguments)
        # Work counts until it has ended, or was never begun: a thread cannot be cancelled.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._places.take, -1, name))
        return await asyncio.wrap_future(future)

    async def run_large(self, large: bool, name: str, work: Callable[..., Result], *arguments: object) -> Result:
        """Runs ``work`` as :meth:`run` does if it is ``large``, else here and now."""
        return await self.run(name, work, *arguments) if large else work(*arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
