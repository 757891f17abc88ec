"""Work that would hold up the event loop: a few threads, and a bound on what waits for them."""

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
    """``close`` waits for what runs. What runs in here must not keep the GIL for long at a time."""

    def __init__(self, threads: int = THREADS, waiting_max: int = WAITING_MAX, what: str = "large requests") -> None:
        """``what`` is worked in here, for who is told that there is too much of it."""
        self._what = what
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="off-loop")
        self._places = Budget(threads + waiting_max)

    async def run(self, name: str, work: Callable[..., Result], *arguments: object) -> Result:
        """``name``: in whose; empty: in nobody's.

        Raises :class:`Unavailable` when too much waits already, of this client or of all, and what ``work`` raises.
        """
        if not self._places.take(1, name):
            raise Unavailable(f"Too many {self._what} are being read.", retry_after_s=1.0)
        future = self._threads.submit(work, *arguments)
        # It counts until it is over, or was never begun: a thread cannot be cancelled.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._places.take, -1, name))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
