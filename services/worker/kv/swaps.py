"""The second tier's memory, and the copies between it and the pool ("KVCache cache in the wild" §4.1).

:class:`pinyon.paging.SecondTier` decides which copies to make, in which order. One thread makes them, layer by layer,
so that the event loop and the engine go on meanwhile. Handing out memory waits for nothing. A reader or writer of a
block waits until its copies are over. The engine waits layer by layer, through the same hook by which it waits for
fetched KV; all others wait for the whole block. The books bound the waits, and lose a block rather than let copies pile
up.

If a copy fails, the contents of both tiers are unknown: all waits fail at once, nothing is copied after that, and
``on_broken`` is to end the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import InvalidArgument
from pinyon.paging import Swap
from pinyon.paging.second_tier import NO_SLOT
from pinyon.runtime.logging import get_logger
from services.worker.kv.arrivals import LayerLost

WAIT_S = 10.0
"""The longest wait for copies. They take milliseconds, so such a wait means that the thread is gone."""

_log = get_logger("swaps")


class Swapping:
    """The copies that the engine's thread waits for; ``last`` is the number of the last batch among them."""

    def __init__(self, swaps: Swaps, last: int) -> None:
        self._swaps = swaps
        self._last = last
        self.stalled_s = 0.0
        """The time the thread has waited."""

    def wait(self, layer: int) -> None:
        """Waits until the layer is where it belongs. Raises :class:`LayerLost` if that takes too long."""
        self.stalled_s += self._swaps.wait_for(self._last, layer)

    def wait_all(self) -> None:
        """Waits for the last layer, which comes after the others."""
        self.wait(self._swaps.layers - 1)


class Swaps:
    """The copier: ``start``, ``submit`` and ``close`` it on the event loop.

    There ``over`` gets the number of copies out of blocks that have ended."""

    def __init__(self, pool: npt.NDArray[np.float32], slots: int, over: Callable[[int], None]) -> None:
        try:
            tier = np.zeros((slots, *pool.shape[1:]), pool.dtype)
        except MemoryError:
            raise InvalidArgument(f"no memory for {slots} blocks of a second tier", field="dram_blocks") from None
        self.on_broken: Callable[[], object] = lambda: None
        """The callback for a failed copy, on the event loop."""
        self.layers = pool.shape[1]
        self._pool = pool.reshape(len(pool), self.layers, -1)
        self._tier = tier.reshape(slots, self.layers, -1)
        self._spare = np.empty_like(self._tier[0, 0])
        self._on_over = over
        self._queue: queue.SimpleQueue[tuple[int, Sequence[Swap]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pinyon-swaps", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._submitted = 0
        """The number of batches; they are numbered from 1."""
        self._last: dict[int, int] = {}
        """The last unfinished batch that touches a block, by block."""
        self._waiters: list[tuple[int, asyncio.Future[None], asyncio.TimerHandle]] = []
        self._moved = threading.Condition()
        self._copied = 0
        """The number of layers copied, over all batches."""
        self._broken = False
        self.under_way = 0
        """The number of blocks that are copied, or wait for that."""
        self.bytes = 0
        self.seconds = 0.0
        """The time that the copies took."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, swaps: Sequence[Swap]) -> None:
        """Makes these copies after all others."""
        self._submitted += 1
        self._last.update((swap.block, self._submitted) for swap in swaps)
        self.under_way += len(swaps)
        self._queue.put((self._submitted, swaps))

    # -- waiting

    def of(self, tables: Iterable[Sequence[int]]) -> Swapping | None:
        """Returns the copies of these blocks that are not over; None: there are none."""
        last = self._last
        found = max((last[block] for table in tables for block in last.keys() & table), default=0) if last else 0
        return Swapping(self, found) if found else None

    def settled(self, blocks: Sequence[int]) -> asyncio.Future[None]:
        """Returns a future, done when these blocks' copies are over; it fails with :class:`LayerLost` if late."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        last = max((self._last[block] for block in self._last.keys() & blocks), default=0)
        if last and self._broken:
            _fail(future)
        elif last:
            timer = loop.call_later(WAIT_S, _fail, future)
            self._waiters.append((last, future, timer))
        else:
            future.set_result(None)
        return future

    def ready(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks have no copies under way."""
        last = self._last
        return next((at for at, block in enumerate(blocks) if block in last), len(blocks)) if last else len(blocks)

    def wait_for(self, batch: int, layer: int) -> float:
        """Waits until the layers of the batch up to this one are copied; returns the seconds. Any thread may call."""
        copied = (batch - 1) * self.layers + layer + 1
        if self._copied >= copied:
            return 0.0
        start_s = time.perf_counter()
        with self._moved:
            self._moved.wait_for(lambda: self._copied >= copied or self._broken, WAIT_S)
            if self._copied < copied:
                raise LayerLost(f"layer {layer} did not come from the second tier")
        return time.perf_counter() - start_s

    async def close(self) -> None:
        """Ends the thread after all that was submitted. Bounded."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, WAIT_S)
        for _, future, timer in self._waiters:
            timer.cancel()
            future.cancel()

    # -- on the event loop

    def _over(self, batch: int, swaps: Sequence[Swap], seconds: float) -> None:
        self.under_way -= len(swaps)
        self.seconds += seconds
        parts = sum((out != NO_SLOT) + (into != NO_SLOT) for _, out, into in swaps)
        self.bytes += parts * self._pool[0].nbytes
        for block, _, _ in swaps:
            if self._last.get(block) == batch:
                del self._last[block]
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            last, future, timer = waiter
            if last > batch and not future.done():
                self._waiters.append(waiter)
                continue
            timer.cancel()
            if not future.done():
                future.set_result(None)
        out = sum(swap.out != NO_SLOT for swap in swaps)
        if out:
            self._on_over(out)

    def _break(self) -> None:
        waiters, self._waiters = self._waiters, []
        for _, future, timer in waiters:
            timer.cancel()
            _fail(future)
        self.on_broken()

    # -- in a thread of its own

    def _work(self) -> None:
        try:
            self._copy_all()
        except Exception:
            _log.exception("a copy between the tiers failed: what they hold is not known any more")
            with self._moved:
                self._broken = True
                self._moved.notify_all()
            self._call(self._break)

    def _copy_all(self) -> None:
        while (batch := self._queue.get()) is not None:
            number, swaps = batch
            start_s = time.perf_counter()
            for layer in range(self.layers):
                for swap in swaps:
                    self._copy(layer, swap)
                with self._moved:
                    self._copied += 1
                    self._moved.notify_all()
            self._call(self._over, number, swaps, time.perf_counter() - start_s)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(function, *args)

    def _copy(self, layer: int, swap: Swap) -> None:
        here = self._pool[swap.block, layer]
        coming = self._tier[swap.into, layer] if swap.into != NO_SLOT else None
        if coming is not None and swap.out == swap.into:
            np.copyto(self._spare, coming)
            coming = self._spare
        if swap.out != NO_SLOT:
            np.copyto(self._tier[swap.out, layer], here)
        if coming is not None:
            np.copyto(here, coming)


def _fail(future: asyncio.Future[None]) -> None:
    if not future.done():
        _log.error("copies between the tiers do not end")
        future.set_exception(LayerLost("the KV did not come from the second tier"))
        future.exception()  # an aborted owner does not look
