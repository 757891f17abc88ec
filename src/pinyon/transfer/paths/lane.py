"""A path's threads, and the chains that were given to it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from pinyon.transfer.chains.chain import Chain
from pinyon.transfer.types.path import Path

_log = logging.getLogger(__name__)
_IDLE_S = 5.0
"""Time after which a thread without work ends."""


class Lane:
    """The threads of a path and the chains that they run. All methods want the peer's lock held."""

    def __init__(self, path: Path, room: int, lock: threading.Lock, run: Callable[[Chain, Path], None]) -> None:
        """Creates a lane whose threads call ``run`` for each chain, without the lock."""
        self.path = path
        self.room = room
        """Number of further chains that the path takes now."""
        self.chains: deque[Chain] = deque()
        """Chains that no thread has taken yet."""
        self.threads: set[threading.Thread] = set()
        self._idle = 0
        self._lock = lock
        self._wake = threading.Condition(lock)
        self._run = run
        self._closed = False

    def give(self, chain: Chain) -> bool:
        """Gives a chain to a thread; returns False if there is none and none can be had."""
        self.chains.append(chain)
        if self._idle >= len(self.chains):
            self._wake.notify()
            return True
        name = f"pinyon-transfer-out-{self.path.transport}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            _log.error("no more threads for transfers: %s", error)
            self.threads.discard(thread)
            if not self.threads:
                self.chains.remove(chain)
                return False
        return True

    def close(self) -> None:
        """Makes the threads end when they have run what was given to them."""
        self._closed = True
        self._wake.notify_all()

    def _work(self) -> None:
        try:
            while True:
                with self._lock:
                    while not self.chains:
                        if self._closed:
                            return
                        self._idle += 1
                        notified = self._wake.wait(_IDLE_S)
                        self._idle -= 1
                        if not notified and not self.chains:
                            self.threads.discard(threading.current_thread())
                            return
                    chain = self.chains.popleft()
                self._run(chain, self.path)
                del chain  # an idle thread must not keep the last chain's buffers alive
        finally:
            with self._lock:
                self.threads.discard(threading.current_thread())
