"""An event loop in a thread of its own, for processes whose other threads have none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pinyon.core.errors import Unavailable
from pinyon.runtime.logging import get_logger

_log = get_logger("loop")

T = TypeVar("T")


class LoopThread:
    """The loop runs from the constructor to :meth:`close`. Any other thread may use it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs the coroutine as a task of the loop. Raises :class:`Unavailable` when the loop has ended."""
        if not self._thread.is_alive() or self._loop.is_closed():
            work.close()
            raise Unavailable("the event loop has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Calls the function in the loop soon; never after its end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def close(self, timeout_s: float) -> None:
        """Cancels all tasks, waits for them at most ``timeout_s``, and ends the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(timeout_s), self._loop)
        self._thread.join(2 * timeout_s)
        if self._thread.is_alive():
            _log.warning("the thread %s does not end", self._thread.name)
        else:
            self._loop.close()

    async def _cancel_all(self, timeout_s: float) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        self._loop.stop()


_threads: list[LoopThread] = []
_making = threading.Lock()
os.register_at_fork(after_in_child=_threads.clear)  # a fork takes no threads along


def shared_thread() -> LoopThread:
    """Returns the event loop of this process, for all parts of pinyon inside an inference engine's process."""
    with _making:
        if not _threads:
            _threads.append(LoopThread("pinyon"))
        return _threads[0]
