"""The common part of transports whose chains run over endpoints: keep them, wait for one, replace what broke.

Mooncake §3.2.3, endpoint management. :class:`EndpointPool` keeps the books; here are the lock, the waits and the ends.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

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
    ChainOutcome,
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
"""Endpoints that one run may use up: one that the peer had closed, and more when what it granted has changed."""
_WAIT_S = 0.25
"""Time within which a chain that waits for an endpoint notices that it was ended."""
_PATIENCE_S = 0.05
"""Time that a chain waits for an endpoint if it may go over another transport."""

E = TypeVar("E", bound=Endpoint)

EXPECTED = (TryAgain, Stalled, DeadlineReached, WireError, OSError)
"""Errors that ``Endpoint.exchange`` and ``Endpoint.move`` raise."""


def failure_of(error: Exception, endpoint: Endpoint) -> tuple[ChainOutcome, bool]:
    """Returns the outcome of a run that raised one of ``EXPECTED``, and whether a fresh endpoint may do.

    It may, for instance, if the peer can have closed this one while it was idle."""
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
        """The endpoint or the room that was handed to the waiter, as ``Endpoints._take`` gives it."""
        self.wake = threading.Condition(lock)


@mypyc_attr(allow_interpreted_subclasses=True)
class Endpoints(ABC, Generic[E]):
    """The ``Transport`` methods of transports with endpoints. Chains wait while all endpoints are in use.

    A freed endpoint goes at once to the chain that has waited longest of those that it can serve. So an endpoint that a
    newcomer finds free is of no use to any waiting chain, and none starves beside a busy path. All methods are
    thread-safe.
    """

    def __init__(self, context: EngineContext, cap_per_path: int) -> None:
        """Allows ``cap_per_path`` endpoints to one peer over one path, ``limits.max_endpoints`` in all."""
        self._context = context
        self._limits = context.limits
        self._meter = context.meter
        self._clock = context.clock
        self._lock = threading.Lock()
        self._pool: EndpointPool[EndpointKey, E] = EndpointPool(context.limits.max_endpoints, cap_per_path)
        self._waiters: deque[_Waiter[E]] = deque()
        """Waiters, the longest wait first."""
        self._handy: dict[EndpointKey, E] = {}
        """One endpoint per path that nobody uses but that the pool counts as used (its gain: docs/design/transfer.md).

        So one chain after another needs neither the lock nor the books. Only ``pop`` takes an endpoint out and
        ``setdefault`` puts it in: both are atomic. Code that needs the books right calls ``_shelve``."""

    moves_bytes = 0
    """Largest number of bytes that the endpoints' ``move`` takes; 0 if it does nothing."""

    @abstractmethod
    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> E:
        """Makes a new endpoint. The peer must first have ended the link with the id ``replaces``; 0 names none.

        Raises like :func:`dial`; any other ``ConnectionError`` too means that there is no connection."""

    # --- running chains ---

    def run(self, chain: Chain, path: Path) -> ChainOutcome:
        """Runs a chain as ``Transport.run`` says."""
        replaces = chain.fence
        outcome = LOST
        midway = False
        for left in reversed(range(_TRIES)):
            endpoint = self.lease(chain, path, replaces)
            if isinstance(endpoint, ChainOutcome):
                return LOST if midway and endpoint is NO_CONNECTION else endpoint
            chain.fence = 0  # the link that it named has ended before this endpoint was made
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

    def lease(self, chain: Chain, path: Path, replaces: int = 0) -> E | ChainOutcome:
        """Returns an endpoint that nobody else uses, a new one if it is to replace another; or why there is none.

        If all are in use, the chain waits for one until the chain ends or its deadline passes, or only ``_PATIENCE_S``
        if it may go elsewhere. Lack of room is not the path's fault."""
        key = (chain.remote.peer, path)
        fresh = replaces != 0
        endpoint = None if fresh or self._waiters else self._handy.pop(key, None)
        if endpoint is None:
            with self._lock:
                taken = self._take(key, fresh)
                found = taken if taken is not None else self._wait(chain, key, fresh)
            if isinstance(found, ChainOutcome):
                return found
            if isinstance(found, list):
                return self._make(chain, path, replaces, found)
            endpoint = found
        if endpoint.is_open():
            endpoint.reused = True
            return endpoint
        endpoint.close(hard=not endpoint.leaving)
        with self._lock:  # its place is kept, so that a chain that has waited does not wait again
            self._pool.discard(endpoint)
            room = self._pool.reserve(key)
        return SHUTDOWN if room is None else self._make(chain, path, replaces, room)

    def lend(self, key: EndpointKey) -> E | None:
        """Returns a ready endpoint for one small request, or None; ``release`` or ``discard`` takes it back."""
        endpoint = None if self._waiters else self._handy.pop(key, None)
        if endpoint is None:
            return None
        if not endpoint.is_open():
            self.discard(endpoint)
            return None
        endpoint.reused, endpoint.answered = True, False
        return endpoint

    def _take(self, key: EndpointKey, fresh: bool) -> E | list[E] | None:
        """Returns an idle endpoint, or those to close to make room for a new one, or None for neither. Lock held."""
        endpoint = None if fresh else self._pool.lease(key)
        return endpoint if endpoint is not None else self._pool.reserve(key)

    def _wait(self, chain: Chain, key: EndpointKey, fresh: bool) -> E | list[E] | ChainOutcome:
        """Waits for what ``_take`` returns, and returns it; or returns why this chain gets nothing. Lock held."""
        waiter: _Waiter[E] = _Waiter(key, fresh, self._lock)
        until = min(chain.deadline, self._clock() + _PATIENCE_S) if chain.elsewhere else chain.deadline
        self._waiters.append(waiter)
        self._shelve()  # only now: an endpoint that becomes handy meanwhile is seen here, or its user sees the waiter
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
        """Gives back what was handed to a waiter whose thread was interrupted. Lock held."""
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
        """Hands an endpoint that has come free, or the room for one, to the first waiter it serves. Lock held."""
        for waiter in self._waiters:
            waiter.found = self._take(waiter.key, waiter.fresh)
            if waiter.found is not None:
                self._waiters.remove(waiter)
                waiter.wake.notify()
                return

    def _make(self, chain: Chain, path: Path, replaces: int, evicted: list[E]) -> E | ChainOutcome:
        """Makes a new endpoint for which there is room, in use by the caller; or returns why there is none."""
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
        """Adds an endpoint, in use by the caller, to those that are kept. Lock held."""
        self._pool.add(key, endpoint)
        endpoint.key, endpoint.leaving = key, self._pool.closed

    def release(self, endpoint: E) -> None:
        """Takes back an endpoint and keeps it for the next user, unless it was aborted or its path was forgotten."""
        key = endpoint.key
        assert key is not None
        may_keep = not self._waiters and not endpoint.leaving and not endpoint.aborted
        if may_keep and self._handy.setdefault(key, endpoint) is endpoint:
            # Checked again: a thread that changed these meanwhile has seen what is handy, or its change is seen here.
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
        """Makes the handy endpoints idle in the pool's books, or gives them to chains that wait. Lock held."""
        for key in list(self._handy):
            endpoint = self._handy.pop(key, None)
            if endpoint is None:
                continue
            if endpoint.reused:
                self._pool.touch(endpoint)
            self._pool.release(endpoint, self._clock())
            self._hand_over()

    def discard(self, endpoint: E) -> None:
        """Closes and strikes off an endpoint that broke in its user's hands."""
        endpoint.close(hard=True)
        self._strike(endpoint)

    def disown(self, endpoint: E) -> None:
        """Ends the link of an endpoint whose user does not respond, and frees its place.

        The user closes the endpoint if it ever goes on. Until then the descriptor stays taken: the user's event loop
        would mistake the next file of that number for it."""
        endpoint.abort()
        self._strike(endpoint)

    def _strike(self, endpoint: E) -> None:
        with self._lock:
            self._pool.discard(endpoint)
            self._hand_over()

    # --- keeping house ---

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        """Probes a path as ``Transport.probe`` says."""
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
        """Forgets a path as ``Transport.forget`` says."""
        self.forget_if(lambda key: key == (remote.peer, path))

    def forget_if(self, failed: Callable[[EndpointKey], bool]) -> None:
        """Forgets, like ``forget``, all paths for which ``failed`` is true."""
        with self._lock:
            left = self._drop(failed)
            self._hand_over()
        _close(left)

    def _drop(self, failed: Callable[[EndpointKey], bool]) -> list[E]:
        """Takes out and returns the endpoints to close; those in use leave when they are released. Lock held."""
        left, used = self._pool.drop(failed)
        for endpoint in used:  # also the handy ones, which must be told before they are taken away: see ``release``
            endpoint.leaving = True
        for key in list(self._handy):
            handy = self._handy.pop(key, None) if failed(key) else None
            if handy is not None:
                self._pool.discard(handy)
                left.append(handy)
        return left

    def maintain(self, now: float) -> None:
        """Maintains as ``Transport.maintain`` says; what was used since the last time counts as idle from now on."""
        with self._lock:
            self._shelve()
            expired = self._pool.expire(now, self._limits.idle_s)
        _close(expired)

    @property
    def endpoints(self) -> int:
        """Number of endpoints open towards peers."""
        return self._pool.open

    def close(self) -> None:
        """Closes all endpoints as ``Transport.close`` says."""
        with self._lock:
            left = self._drop(lambda _: True)
            self._pool.closed = True
            for waiter in self._waiters:
                waiter.wake.notify()
        _close(left)


class ShortWay:
    """A path that is alone in the best tier between two memory locations, and whose endpoints move requests themselves.

    Its rate decides nothing, and is not measured.
    """

    __slots__ = ("endpoints", "key", "open", "path")

    def __init__(self, key: EndpointKey, endpoints: Endpoints[Any]) -> None:
        self.key = key
        self.path = key[1]
        self.endpoints = endpoints
        self.open = True
        """True while nothing is known to be wrong with it. Once it is shut it stays so."""


def _close(endpoints: Iterable[Endpoint]) -> None:
    for endpoint in endpoints:
        endpoint.close(hard=False)
