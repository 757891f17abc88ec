"""Several submissions that are awaited together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from pinyon.core.clock import Clock
from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.types.request import TransferRequest, TransferResult

Submit = Callable[[Sequence[TransferRequest], float | None], TransferHandle]


class TransferGroup:
    """Submit now, from any thread; await all later. Made for pushing KV layer by layer: the engine thread submits a
    layer's WRITEs as it is computed, the event loop awaits them when the chunk is done."""

    def __init__(self, submit: Submit, clock: Clock) -> None:
        self._submit = submit
        self._clock = clock
        self._lock = threading.Lock()
        self._handles: list[TransferHandle] = []

    def submit(self, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> TransferHandle:
        """Does not block. Raises what ``TransferEngine.submit`` raises."""
        handle = self._submit(requests, timeout_s)
        with self._lock:
            self._handles.append(handle)
        return handle

    @property
    def handles(self) -> list[TransferHandle]:
        with self._lock:
            return list(self._handles)

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()

    def wait(self, timeout_s: float | None = None) -> list[TransferResult]:
        """Results of everything submitted before this call, in order of submission."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        results: list[TransferResult] = []
        for handle in self.handles:
            results += handle.wait(None if deadline is None else max(0.0, deadline - self._clock()))
        return results

    async def wait_async(self, timeout_s: float | None = None) -> list[TransferResult]:
        """Like :meth:`wait`. A cancelled task cancels all of the group and waits until local memory is free."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        results: list[TransferResult] = []
        handles = self.handles
        cancelled = False
        for handle in handles:
            try:
                results += await handle.wait_async(None if deadline is None else max(0.0, deadline - self._clock()))
            except asyncio.CancelledError:
                cancelled = True
                for other in handles:
                    other.cancel()
        if cancelled:
            raise asyncio.CancelledError
        return results
