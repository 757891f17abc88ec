"""A queue of chains with threads that come on demand and go when idle."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from pinyon.transfer.request import Reason, TransferStatus
from pinyon.transfer.transports.base import Chain, Outcome

__all__ = ["Lane"]

_log = logging.getLogger(__name__)


class Lane:
    """First come, first served, by up to ``max_threads`` threads. One lane per peer, so that a frozen peer holds up
    only its own chains."""

    def __init__(self, name: str, run: Callable[[Chain], None], max_threads: int, idle_s: float) -> None:
        self._name = name
        self._run = run
        self._max_threads = max_threads
        self._idle_s = idle_s
        self._ready = threading.Condition()
        self._chains: deque[Chain] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def submit(self, chain: Chain) -> bool:
        """Queue the chain. False: the lane is closed and the chain was not touched."""
        with self._ready:
            if self._closed:
                return False
            self._chains.append(chain)
            if self._idle >= len(self._chains):
                self._ready.notify()
                return True
            if len(self._threads) >= self._max_threads or self._start_thread():
                return True
            self._chains.remove(chain)
        # No thread can be had and none is there to run it: say so instead of hanging.
        chain.stop(Outcome(TransferStatus.FAILED, Reason.INTERNAL))
        return True

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._threads.discard(thread)
            _log.error("no more threads for transfers: %s", error)
            return bool(self._threads)
        return True

    def _work(self) -> None:
        try:
            while True:
                with self._ready:
                    while not self._chains:
                        if self._closed:
                            return
                        self._idle += 1
                        notified = self._ready.wait(self._idle_s)
                        self._idle -= 1
                        if not notified and not self._chains:
                            self._threads.discard(threading.current_thread())
                            return
                    chain = self._chains.popleft()
                try:
                    self._run(chain)
                except Exception:
                    _log.exception("a transfer chain ended in a defect")
                    chain.finish(Outcome(TransferStatus.FAILED, Reason.INTERNAL))
                del chain  # an idle thread must not keep the last chain's buffers alive
        finally:
            with self._ready:
                self._threads.discard(threading.current_thread())

    @property
    def idle(self) -> bool:
        """No thread, nothing queued: the lane can be dropped."""
        with self._ready:
            return not self._threads and not self._chains

    @property
    def busy(self) -> bool:
        """Something runs or is queued."""
        with self._ready:
            return bool(self._chains) or len(self._threads) > self._idle

    def fail_queued(self, outcome: Outcome) -> None:
        """End what is queued, with this outcome."""
        with self._ready:
            left = list(self._chains)
            self._chains.clear()
        for chain in left:
            chain.stop(outcome)

    def close(self) -> list[threading.Thread]:
        """Take nothing more, end what is queued as CANCELLED; returns the threads to join."""
        with self._ready:
            self._closed = True
            threads = list(self._threads)
            self._ready.notify_all()
        self.fail_queued(Outcome(TransferStatus.CANCELLED, Reason.SHUTDOWN))
        return threads
