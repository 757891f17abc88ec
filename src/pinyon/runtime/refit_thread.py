"""A thread in which eviction policies learn; meanwhile the event loop evicts by what was learned before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pinyon.runtime.logging import get_logger

CLOSE_S = 5.0

_log = get_logger("refit")


class RefitThread:
    """A :data:`pinyon.eviction.policy.Refit` of an event loop, which adopts the results.

    Work that comes while the work of all ``policies`` is under way is dropped, as newer work comes soon.
    """

    def __init__(self, policies: int = 1) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="refit")
        self._policies = policies
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def __call__(self, work: Callable[[], Any], adopt: Callable[[Any], object]) -> None:
        if len(self._tasks) < self._policies and not self._closed:
            task = asyncio.get_running_loop().create_task(self._run(work, adopt), name="refit")
            self._tasks.add(task)

    async def _run(self, work: Callable[[], Any], adopt: Callable[[Any], object]) -> None:
        try:
            fit = await asyncio.get_running_loop().run_in_executor(self._executor, work)
            if not self._closed:
                adopt(fit)
        except Exception:  # a bug; the policy goes on with what it knew
            _log.exception("a refit failed")
        finally:
            self._tasks.difference_update((asyncio.current_task(),))

    async def close(self) -> None:
        """Ends the adoption of results, and waits for running work, up to a limit."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        self._executor.shutdown(wait=False, cancel_futures=True)
