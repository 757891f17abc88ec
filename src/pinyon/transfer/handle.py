"""Handles, by which callers learn that their requests have ended: they wait, await, poll or set a callback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from pinyon.core.clock import Clock
from pinyon.transfer.chains.batch import BatchProgress
from pinyon.transfer.chains.chain import LATE, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.types.request import Reason, TransferRequest, TransferResult, TransferStatus

_log = logging.getLogger(__name__)
_CANCEL = ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED)

Finished = Callable[["TransferHandle", Chain, dict[tuple[TransferStatus, Reason], int], int, float], None]
"""A function of the handle, the chain, the requests that it ended by outcome, bytes moved, and time of submission."""


class TransferHandle:
    """A submitted batch. All methods may be called from any thread.

    All requests have a final status soon after the deadline, whatever happens. From then on this engine touches none of
    their local memory."""

    def __init__(self, lengths: list[int], began: float, deadline: float, on_chain: Finished, clock: Clock) -> None:
        """Creates a handle for requests of these ``lengths`` in bytes; ``began`` and ``deadline`` are by the clock."""
        self._clock = clock
        self._state = BatchProgress(lengths)
        self._began = began
        self._deadline = deadline
        self._on_chain = on_chain
        self._lock = threading.Lock()
        self._event: threading.Event | None = None  # made by the first waiter: a blocking transfer rarely needs one
        self._callbacks: list[Callable[[TransferHandle], None]] = []
        self._chains: set[Chain] = set()  # in flight
        self._finished = False

    # --- for the engine ---

    def _start(self, chains: Iterable[Chain]) -> None:
        """Adds chains that move the requests; each calls ``_chain_done`` when it has ended."""
        with self._lock:
            self._chains.update(chains)

    def _chain_done(self, chain: Chain, outcome: ChainOutcome) -> None:
        """Accounts for an ended chain. A transport calls it once per chain, in its own thread."""
        with self._lock:
            finals, moved = self._state.slices_done(chain.slices, outcome.status, outcome.reason, outcome.refusals)
        self._on_chain(self, chain, finals, moved, self._began)
        with self._lock:
            # Only now, so that a waiter sees counters and pins that agree with the statuses.
            self._chains.remove(chain)
            if self._chains:
                return
            self._finished = True
            if self._event is not None:
                self._event.set()
            if not self._callbacks:
                return
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _stop(self, outcome: ChainOutcome) -> None:
        """Ends the chains that have not ended; returns at once."""
        with self._lock:
            chains = list(self._chains)
        for chain in chains:
            chain.stop(outcome)

    def abandon(self) -> None:
        """Ends everything when the submitter is interrupted, as by Ctrl-C; on return, nothing touches local memory."""
        if self._chains:
            self._stop(SHUTDOWN)
            self.wait()

    def _call(self, callback: Callable[[TransferHandle], None]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a transfer's done callback failed")

    # --- for the caller ---

    @property
    def done(self) -> bool:
        """True when all requests are final. Reading this also enforces the deadline, so polling ends."""
        if not self._finished and self._clock() > self._deadline:
            self._stop(LATE)
        return self._finished

    def results(self) -> list[TransferResult]:
        """Returns the present state of every request, in order."""
        with self._lock:
            return self._state.results()

    def cancel(self) -> None:
        """Stops requests that have not ended; returns at once. Running chains are aborted by closing their connections.

        A cancelled WRITE may still be applied by the peer, until it takes the key back."""
        self._stop(_CANCEL)

    def add_done_callback(self, callback: Callable[[TransferHandle], None]) -> None:
        """Calls ``callback(handle)`` when all requests are final; at once if they already are.

        The callback runs in a transport thread and must be short; an exception that it raises is logged."""
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def wait(self, timeout_s: float | None = None) -> list[TransferResult]:
        """Waits until all requests are final, and returns their results.

        At the deadline, or ``timeout_s`` from now if that is sooner, the unfinished requests are stopped and end as
        TIMEOUT. This waits until running ones no longer use local memory."""
        with self._lock:
            if self._finished:
                return self._state.results()
            event = self._event = self._event or threading.Event()
        deadline = self._deadline if timeout_s is None else min(self._deadline, self._clock() + timeout_s)
        while not event.wait(max(0.0, deadline - self._clock())):
            self._stop(LATE)  # ends waiting chains, aborts running ones
            deadline = self._clock() + 0.1
        return self.results()

    async def wait_async(self, timeout_s: float | None = None) -> list[TransferResult]:
        """Waits like :meth:`wait`, for asyncio. When the task is cancelled, so are the transfers.

        The cancellation is raised after they have let go of the local memory."""
        if self._finished:
            return self.results()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finished() -> None:
            if not future.done():
                future.set_result(None)

        def wake(_: TransferHandle) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finished)

        self.add_done_callback(wake)
        deadline = self._deadline if timeout_s is None else min(self._deadline, self._clock() + timeout_s)
        stop = LATE
        cancelled = False
        while not future.done():
            try:
                await asyncio.wait((future,), timeout=max(0.0, deadline - self._clock()))
            except asyncio.CancelledError:
                cancelled, stop = True, _CANCEL
            if not future.done():
                self._stop(stop)
                deadline = self._clock() + 0.1
        if cancelled:
            raise asyncio.CancelledError
        return self.results()

    def __await__(self) -> Generator[Any, None, list[TransferResult]]:
        return self.wait_async().__await__()


class TransferGroup:
    """Batches that are submitted now, from any thread, and awaited together later.

    Made for pushing KV layer by layer: the engine thread submits a layer's WRITEs as it is computed, the event loop
    awaits them when the chunk is done."""

    def __init__(
        self, submit: Callable[[Sequence[TransferRequest], float | None], TransferHandle], clock: Clock
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._lock = threading.Lock()
        self._handles: list[TransferHandle] = []

    def submit(self, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> TransferHandle:
        """Submits a batch without blocking. Raises what ``TransferEngine.submit`` raises."""
        handle = self._submit(requests, timeout_s)
        with self._lock:
            self._handles.append(handle)
        return handle

    async def wait_async(self, timeout_s: float | None = None) -> list[TransferResult]:
        """Waits for everything submitted before this call; returns the results in order of submission.

        A cancelled task cancels all of the group and waits until local memory is free."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        results: list[TransferResult] = []
        with self._lock:
            handles = list(self._handles)
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
