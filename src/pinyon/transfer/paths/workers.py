"""The threads in which chains and probes run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)
_IDLE_S = 5.0
"""Time after which a thread without work ends."""

_Call = tuple[Callable[..., None], tuple[Any, ...]]


class Workers:
    """Threads that carry out one call at a time each, whichever peer it is for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """Calls for the next idle threads; None ends one."""
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        """Number of threads that wait for a call, less the calls that wait for a thread."""

    def start(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Starts a call, which must not raise; returns False if there is no thread and none can be had."""
        with self._lock:
            if self._idle <= 0:
                thread = threading.Thread(target=self._work, name="pinyon-transfer-out", daemon=True)
                self._threads.add(thread)
                try:
                    thread.start()
                    self._idle += 1
                except RuntimeError as error:
                    _log.error("no more threads for transfers: %s", error)
                    self._threads.discard(thread)
            if not self._threads:
                return False
            self._idle -= 1
            self._calls.put((call, arguments))
            return True

    def _work(self) -> None:
        while (work := self._next()) is not None:
            call, arguments = work
            call(*arguments)
            del work, call, arguments  # an idle thread must not keep the last chain's buffers alive
            with self._lock:
                self._idle += 1

    def _next(self) -> _Call | None:
        try:
            return self._calls.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                if self._idle > 0:
                    self._idle -= 1
                    self._threads.discard(threading.current_thread())
                    return None
            return self._calls.get()  # a call came just now

    def close(self) -> list[threading.Thread]:
        """Makes all threads end when they have done what they were given; returns them. No call may come any more."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        return threads
