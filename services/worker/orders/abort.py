"""The way to stop a request from outside, in whatever phase it waits."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pinyon.core.errors import PinyonError

T = TypeVar("T")


class Abort:
    """A switch that stops a request: after ``fire``, waiting through this object raises the error, now or later.

    It ends the waiting, not the work waited for: the phase that waits gives back what it holds. One waiter at a time.
    """

    def __init__(self) -> None:
        self.error: PinyonError | None = None
        self._gate: asyncio.Future[Any] | None = None

    def fire(self, error: PinyonError) -> bool:
        """Stops the request. Returns False if it was stopped before: the first reason stays."""
        if self.error is not None:
            return False
        self.error = error
        if self._gate is not None and not self._gate.done():
            self._gate.set_exception(error)
        return True

    def check(self) -> None:
        """Raises the error if :meth:`fire` was called."""
        if self.error is not None:
            raise self.error

    async def wait(self, future: asyncio.Future[T], timeout: PinyonError | None = None, timeout_s: float = 0.0) -> T:
        """Returns the future's result or raises the error; raises ``timeout`` if that takes ``timeout_s`` seconds."""
        self.check()
        if future.done():
            return future.result()
        loop = asyncio.get_running_loop()
        gate: asyncio.Future[Any] = loop.create_future()
        self._gate = gate

        def opened(_: object) -> None:
            if not gate.done():
                gate.set_result(None)

        def late() -> None:
            if not gate.done() and timeout is not None:
                gate.set_exception(timeout)

        future.add_done_callback(opened)
        timer = loop.call_later(timeout_s, late) if timeout is not None else None
        try:
            await gate
        finally:
            self._gate = None
            future.remove_done_callback(opened)
            if timer is not None:
                timer.cancel()
        self.check()
        return future.result()
