"""What transports do alike whose chains run over endpoints: keep them, wait for one, replace what broke.

Mooncake §3.2.3, endpoint management. The books are :class:`EndpointPool`'s; here are the lock, the waits and the ends.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from mypy_extensions import mypyc_attr

from pinyon.transfer.chains.chain import (
    BAD_BYTES,
    GONE,
    LATE,
    LOST,
    NO_CONNECTION,
    NO_ROOM,
    SHUTDOWN,
    STALLED,
    Chain,
    Outcome,
)
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import dial_failure
from pinyon.transfer.links.endpoint import Endpoint, EndpointKey, TryAgain
from pinyon.transfer.links.endpoint_pool import EndpointPool
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import Opcode, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

_log = logging.getLogger(__name__)
_TRIES = 3
"""Endpoints that one run may use up: one that the peer had closed, and when what it granted has changed."""
_WAIT_S = 0.25
"""A chain that waits for an endpoint notices within this time that it was ended."""
_PATIENCE_S = 0.05
"""So long a chain waits for an endpoint that may go over another transport."""

E = TypeVar("E", bound=Endpoint)

EXPECTED = (TryAgain, Stalled, DeadlineReached, WireError, OSError)
"""What ``Endpoint.exchange`` and ``Endpoint.move`` raise."""


def failure_of(error: Exception, endpoint: Endpoint) -> tuple[Outcome, bool]:
    """How what ran on the endpoint ended (``EXPECTED``), and whether a fresh endpoint may do: the peer may have closed
    one that sat idle."""
    if isinstance(error, TryAgain):
        return LOST, True
    if isinstance(error, Stalled):
        return STALLED, False
    if isinstance(error, DeadlineReached):
        return LATE, False
    if isinstance(error, WireError):
        _log.info("a peer broke the protocol of a transfer link: %s", error)
        return BAD_BYTES, False
    return LOST, endpoint.reused and not endpoint.answered


class _Waiter(Generic[E]):
    __slots__ = ("found", "fresh", "key", "wake")

    def __init__(self, key: EndpointKey, fresh: bool, lock: threading.Lock) -> None:
        self.key = key
        self.fresh = fresh
        self.found: E | list[E] | None = None
        """What was handed to it, as ``Endpoints._take`` gives it."""
        self.wake = threading.Condition(lock)


@mypyc_attr(allow_interpreted_subclasses=True)
class Endpoints(ABC, Generic[E]):
    """The ``Transport`` methods of those transports. One with as many endpoints as it may have lets chains wait.

    What comes free is handed at once to whoever has waited longest of those it can serve. So whatever a newcomer finds
    free is of no use to anybody who waits, and nobody starves beside a busy path. All methods are thread-safe.
    """

    def __init__(self, context: EngineContext, cap_per_path: int) -> None:
        """``cap_per_path`` endpoints to one peer over one path, ``limits.max_endpoints`` in all."""
        self._context = context
        self._limits = context.limits
        self._meter = context.meter
        self._clock = context.clock
        self._lock = threading.Lock()
        self._pool: EndpointPool[EndpointKey, E] = EndpointPool(context.limits.max_endpoints, cap_per_path)
        self._waiters: deque[_Waiter[E]] = deque()
        """Longest wait first."""
        self._handy: dict[EndpointKey, E] = {}
        """Per path one endpoint that nobody uses but that the pool takes for used, so that one chain after another
        needs neither the lock nor the books (docs/design/transfer.md: what that saves). Taken by ``pop`` and put by
        ``setdefault``, which are atomic. Whoever wants the books right calls ``_shelve``."""

    moves_bytes = 0
    """Most bytes that its endpoints' ``move`` takes; 0: it does nothing."""

    @abstractmethod
    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> E:
        """A new endpoint. ``replaces``: id of an earlier one's link that the peer must have ended before; 0 for none.

        Raises: like :func:`dial`; any other ``ConnectionError`` too means that there is no connection.
        """

    # --- running chains ---

    def run(self, chain: Chain, path: Path) -> Outcome:
        """See ``Transport.run``."""
        replaces = chain.fence
        outcome = LOST
        midway = False
        for left in reversed(range(_TRIES)):
            endpoint = self.lease(chain, path, replaces)
            if isinstance(endpoint, Outcome):
                return LOST if midway and endpoint is NO_CONNECTION else endpoint
            chain.fence = 0  # what it named has ended before this endpoint came to be
            claimed = again = False
            try:
                endpoint.answered = False
                endpoint.prepare(chain)
                claimed = chain.claim(endpoint.abort)
                if not claimed:
                    self.release(endpoint)
                    return GONE
                outcome = endpoint.exchange(chain)
            except EXPECTED as error:
                outcome, again = failure_of(error, endpoint)
                midway = midway or isinstance(error, TryAgain)
            except BaseException:  # Ctrl-C in a blocking caller's thread, or a defect
                self.discard(endpoint)
                if claimed:
                    chain.unclaim()
                raise
            if outcome.status is TransferStatus.COMPLETED:
                chain.unclaim()
                self.release(endpoint)  # which closes it if the chain was stopped meanwhile
                return outcome
            # Closed before anybody hears of the end: until then an RDMA READ may land in local memory.
            self.discard(endpoint)
            if claimed and chain.opcode is Opcode.WRITE:
                chain.fence = endpoint.link.id
            stopped = claimed and not chain.unclaim()
            if not again or not left or stopped or endpoint.aborted:
                break
            replaces = endpoint.link.id
            with self._meter.lock:
                self._meter.stats.retries += 1
        return outcome

    def lease(self, chain: Chain, path: Path, replaces: int = 0) -> E | Outcome:
        """An endpoint that nobody else uses, a new one if it is to replace another; or why there is none.

        When all that there may be are in use, it waits until it is handed one, the chain ends, or its deadline passes;
        not that long if the chain may go elsewhere. That there is no room is not the path's fault.
        """
        key = (chain.remote.peer, path)
        fresh = replaces != 0
        endpoint = None if fresh or self._waiters else self._handy.pop(key, None)
        if endpoint is None:
            with self._lock:
                taken = self._take(key, fresh)
                found = taken if taken is not None else self._wait(chain, key, fresh)
            if isinstance(found, Outcome):
                return found
            if isinstance(found, list):
                return self._make(chain, path, replaces, found)
            endpoint = found
        if endpoint.is_open():
            endpoint.reused = True
            return endpoint
        endpoint.close(hard=not endpoint.leaving)
        with self._lock:  # its place is kept: who has waited does not wait again
            self._pool.discard(endpoint)
            room = self._pool.reserve(key)
        return SHUTDOWN if room is None else self._make(chain, path, replaces, room)

    def lend(self, key: EndpointKey) -> E | None:
        """An endpoint that lies ready, for one small request: to be given back by ``release`` or ``discard``."""
        endpoint = None if self._waiters else self._handy.pop(key, None)
        if endpoint is None:
            return None
        if not endpoint.is_open():
            self.discard(endpoint)
            return None
        endpoint.reused, endpoint.answered = True, False
        return endpoint

    def _take(self, key: EndpointKey, fresh: bool) -> E | list[E] | None:
        """Lock held. An idle endpoint; or those that made room for a new one, to be closed; or neither is to be had."""
        endpoint = None if fresh else self._pool.lease(key)
        return endpoint if endpoint is not None else self._pool.reserve(key)

    def _wait(self, chain: Chain, key: EndpointKey, fresh: bool) -> E | list[E] | Outcome:
        """Lock held. What is handed to this chain, as ``_take`` gives it; or why nothing is."""
        waiter: _Waiter[E] = _Waiter(key, fresh, self._lock)
        until = min(chain.deadline, self._clock() + _PATIENCE_S) if chain.elsewhere else chain.deadline
        self._waiters.append(waiter)
        self._shelve()  # after that, so that what becomes handy meanwhile is either seen here or sees the waiter
        try:
            while waiter.found is None:
                if self._pool.closed:
                    return SHUTDOWN
                if chain.done:
                    return GONE
                remaining = until - self._clock()
                if remaining <= 0:
                    return NO_ROOM
                waiter.wake.wait(min(remaining, _WAIT_S))
            return waiter.found
        except BaseException:  # Ctrl-C in a blocking caller's thread
            self._give_back(waiter)
            raise
        finally:
            if waiter.found is None:
                self._waiters.remove(waiter)

    def _give_back(self, waiter: _Waiter[E]) -> None:
        """Lock held. Its thread does not live to use what it may have been handed."""
        if waiter.found is None:
            return
        if isinstance(waiter.found, list):
            self._pool.cancel(waiter.key)
            unused = waiter.found
        else:
            self._pool.discard(waiter.found)
            unused = [waiter.found]
        self._hand_over()
        _close(unused)

    def _hand_over(self) -> None:
        """Lock held. One endpoint, or the room for one, may have come free."""
        for waiter in self._waiters:
            waiter.found = self._take(waiter.key, waiter.fresh)
            if waiter.found is not None:
                self._waiters.remove(waiter)
                waiter.wake.notify()
                return

    def _make(self, chain: Chain, path: Path, replaces: int, evicted: list[E]) -> E | Outcome:
        """A new endpoint, in use by the caller, for which there is room; or why there is none."""
        key = (chain.remote.peer, path)
        try:
            _close(evicted)
            endpoint = self.connect(chain.remote, path, chain.deadline, replaces)
        except BaseException as error:
            with self._lock:
                self._pool.cancel(key)
                self._hand_over()
            outcome = dial_failure(error, chain.deadline, self._clock())
            if outcome is None:
                raise
            return outcome
        with self._lock:
            self._add(key, endpoint)
        return endpoint

    def _add(self, key: EndpointKey, endpoint: E) -> None:
        """Lock held. It is kept from now on, in use by the caller."""
        self._pool.add(key, endpoint)
        endpoint.key, endpoint.leaving = key, self._pool.closed

    def release(self, endpoint: E) -> None:
        """Its user is done with it: it is kept for the next one, unless it was aborted or its path was forgotten."""
        key = endpoint.key
        assert key is not None
        may_keep = not self._waiters and not endpoint.leaving and not endpoint.aborted
        if may_keep and self._handy.setdefault(key, endpoint) is endpoint:
            # Looked at again: who changed these meanwhile has either seen what is handy, or is seen here.
            if not self._waiters and not endpoint.leaving:
                return
            handy = self._handy.pop(key, None)
            if handy is None:
                return
            endpoint = handy
        with self._lock:
            if endpoint.leaving or endpoint.aborted:
                self._pool.discard(endpoint)
                kept = False
            else:
                kept = self._pool.release(endpoint, self._clock())
            if self._waiters:
                self._hand_over()
        if not kept:
            endpoint.close(hard=endpoint.aborted)

    def _shelve(self) -> None:
        """Lock held. What is handy becomes idle in the pool's books, or that of who waits for it."""
        for key in list(self._handy):
            endpoint = self._handy.pop(key, None)
            if endpoint is None:
                continue
            if endpoint.reused:
                self._pool.touch(endpoint)
            self._pool.release(endpoint, self._clock())
            self._hand_over()

    def discard(self, endpoint: E) -> None:
        """It broke in its user's hands."""
        endpoint.close(hard=True)
        self._strike(endpoint)

    def disown(self, endpoint: E) -> None:
        """Its user is not heard of: the link ends and its place comes free. The user, if he ever goes on, closes it:
        until then his event loop would take the next file of that number for it."""
        endpoint.abort()
        self._strike(endpoint)

    def _strike(self, endpoint: E) -> None:
        with self._lock:
            self._pool.discard(endpoint)
            self._hand_over()

    # --- keeping house ---

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        """See ``Transport.probe``."""
        key = (remote.peer, path)
        try:
            endpoint = self.connect(remote, path, deadline, 0)
        except Exception as error:
            if dial_failure(error, deadline, self._clock()) is None:
                raise
            return False
        with self._lock:
            evicted = self._pool.reserve(key)
            if evicted is not None:
                self._add(key, endpoint)
        if evicted is None:
            endpoint.close(hard=False)
        else:
            self.release(endpoint)
            _close(evicted)
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        """See ``Transport.forget``."""
        self.forget_if(lambda key: key == (remote.peer, path))

    def forget_if(self, failed: Callable[[EndpointKey], bool]) -> None:
        """Like ``forget`` for all paths of which that is true."""
        with self._lock:
            left = self._drop(failed)
            self._hand_over()
        _close(left)

    def _drop(self, failed: Callable[[EndpointKey], bool]) -> list[E]:
        """Lock held. Those to be closed; those in use leave when they are released."""
        left, used = self._pool.drop(failed)
        for endpoint in used:  # among them what is handy: told before that is taken away, see ``release``
            endpoint.leaving = True
        for key in list(self._handy):
            handy = self._handy.pop(key, None) if failed(key) else None
            if handy is not None:
                self._pool.discard(handy)
                left.append(handy)
        return left

    def maintain(self, now: float) -> None:
        """See ``Transport.maintain``. What was used since the last time counts as idle from now on."""
        with self._lock:
            self._shelve()
            expired = self._pool.expire(now, self._limits.idle_s)
        _close(expired)

    @property
    def endpoints(self) -> int:
        """Open towards peers."""
        return self._pool.open

    @property
    def waiting(self) -> int:
        """Chains that wait for an endpoint now."""
        return len(self._waiters)

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._lock:
            left = self._drop(lambda _: True)
            self._pool.close()
            for waiter in self._waiters:
                waiter.wake.notify()
        _close(left)


def _close(endpoints: Iterable[Endpoint]) -> None:
    for endpoint in endpoints:
        endpoint.close(hard=False)
