"""Small duties that must be done although nobody waits for them: each ends, and has an owner that waits for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pinyon.core.errors import PinyonError
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

_log = get_logger("background")

T = TypeVar("T")


class Background:
    """A runner of coroutines that limit their own time (each has a deadline). ``close`` waits for all of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, duty: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts the duty. An exception from it is logged; awaiting the task is optional."""
        task = asyncio.create_task(duty, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def answer(
        self,
        name: str,
        question: Coroutine[Any, Any, T],
        return_name: str,
        give_back: Callable[[T], Coroutine[Any, Any, None]],
    ) -> T:
        """Returns the answer to a question that a caller waits for.

        The question is shielded: if the caller is cancelled, ``give_back`` gets the answer, because otherwise nobody
        would know what was granted. The names appear in log lines."""
        asking: asyncio.Task[T] = self.run(question, name)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self.run(_unwanted(asking, give_back), return_name)
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, PinyonError):
            _log.debug("%s: %s", task.get_name(), error.message)
        elif error is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self, timeout_s: float) -> None:
        """Waits for running duties; cancels those that take longer than ``timeout_s``."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await ended(*self._tasks)


async def _unwanted(asking: asyncio.Task[T], give_back: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    await asyncio.wait({asking})
    if not asking.cancelled() and asking.exception() is None:
        await give_back(asking.result())
