"""The pool of endpoints, which is the common part of transports that have them.

A transport leases an endpoint to one chain at a time; at the limits a chain waits for one; what broke is replaced.
Mooncake §3.2.3, endpoint management: made on demand, pooled, their number bounded, evicted by SIEVE (Zhang et al., NSDI
'24, Algorithm 1)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mypy_extensions import mypyc_attr

from pinyon.transfer.chains.chain import GONE, LOST, NO_CONNECTION, NO_ROOM, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import dial_failure
from pinyon.transfer.links.endpoint import EXPECTED, Endpoint, EndpointKey, TryAgain, failure_of
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.request import Opcode, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

_TRIES = 3
"""Endpoints that one run may use up: one that the peer had closed, and more when what it granted has changed."""
_WAIT_S = 0.25
"""Time within which a chain that waits for an endpoint notices that it was ended."""

E = TypeVar("E", bound=Endpoint)


@mypyc_attr(allow_interpreted_subclasses=True)
class Endpoints(ABC, Generic[E]):
    """The ``Transport`` methods of transports with endpoints. All methods are thread-safe.

    A chain takes the endpoint of its path that was used last and is free, or makes one. At the limits it waits until
    one is free."""

    def __init__(self, context: EngineContext, most: int) -> None:
        """Allows ``most`` endpoints to one peer over one path, and ``limits.max_endpoints`` in all."""
        self._context = context
        self._limits = context.limits
        self._meter = context.meter
        self._clock = context.clock
        self._lock = threading.Condition(threading.Lock())
        """The lock of what follows; notified when some who wait have got what they wait for, and at the end."""
        self._waiters: deque[_Waiter[E]] = deque()
        """Chains that wait, the longest wait first."""
        self._most = most
        self._queue: list[E] = []
        """All endpoints, the oldest first: SIEVE's queue. It is changed with the lock held, as the hand is."""
        self._hand = 0
        """The place in the queue where the next search for an endpoint to evict begins."""
        self._counts: Counter[EndpointKey] = Counter()
        """Endpoints per path, with those being made."""
        self._free: dict[EndpointKey, list[Any]] = {}
        """The free endpoints, the one used last at the end; a path has an entry while it has any endpoint.

        Only ``append``, ``pop`` and ``remove`` change an entry. They are atomic, so that one chain after another needs
        no lock. A lock cost a single transfer of 4 or 64 KiB over tcp 14 to 24 % of its throughput."""
        self._closed = False

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

        Where all are in use, chains wait in turn; each gets the first that it can use. Lack of room is not the path's
        fault."""
        key = (chain.remote.peer, path)
        found = (None if replaces else self.lend(key)) or self._wait(chain, key, replaces != 0)
        return self._make(chain, path, replaces, found) if isinstance(found, list) else found

    def lend(self, key: EndpointKey) -> E | None:
        """Returns a ready endpoint, or None, also while chains wait; ``release`` or ``discard`` takes it back."""
        free = self._free.get(key)
        while free and not self._waiters:
            try:
                endpoint: E = free.pop()
            except IndexError:  # another thread was first
                break
            if endpoint.wake():
                return endpoint
            self._close(endpoint, hard=not endpoint.leaving)
        return None

    def _wait(self, chain: Chain, key: EndpointKey, fresh: bool) -> E | list[E] | ChainOutcome:
        """Returns what ``_find`` returns, once this chain's turn has come, or why it gets nothing."""
        waiter: _Waiter[E] = _Waiter(key, fresh)
        with self._lock:
            # before it looks: an endpoint freed meanwhile is seen here, or its user sees that somebody waits
            self._waiters.append(waiter)
            try:
                if not self._closed:
                    self._serve()
                while waiter.found is None:
                    if self._closed:
                        return SHUTDOWN
                    if chain.done or chain.stopped:
                        return GONE
                    left_s = chain.deadline - self._clock()
                    if left_s <= 0:
                        return NO_ROOM
                    self._lock.wait(min(left_s, _WAIT_S))
                return waiter.found
            except BaseException:  # Ctrl-C in a blocking caller's thread
                if isinstance(waiter.found, list):
                    for endpoint in waiter.found:
                        endpoint.close(hard=False)
                    self._uncount(key)
                elif waiter.found is not None:
                    waiter.found.shelf.append(waiter.found)
                self._serve()
                raise
            finally:
                if waiter.found is None:
                    self._waiters.remove(waiter)

    def _serve(self) -> None:
        """Hands what is free, or room, to those who wait and can use it, in turn. Lock held."""
        for waiter in list(self._waiters):
            waiter.found = self._find(waiter.key, waiter.fresh)
            if waiter.found is not None:
                self._waiters.remove(waiter)
                self._lock.notify_all()

    def _find(self, key: EndpointKey, fresh: bool) -> E | list[E] | None:
        """Returns a free endpoint, unless it is to be ``fresh``. Returns those to close for a new one, whose room is
        reserved, where that is possible, else None. Lock held."""
        free = self._free.get(key)
        full = self._counts[key] >= self._most
        victim: E | None = None
        if free and (full or not fresh):
            try:
                victim = free.pop()
            except IndexError:  # a thread that needs no lock was first
                return None
            if not fresh and victim.wake():
                return victim
        elif full:
            return None
        elif self._counts.total() >= self._limits.max_endpoints:
            victim = self._victim()
            if victim is None or not victim.take():
                return None
        if victim is not None:
            self._drop(victim)
        self._counts[key] += 1
        return [] if victim is None else [victim]

    def _make(self, chain: Chain, path: Path, replaces: int, evicted: list[E]) -> E | ChainOutcome:
        """Makes an endpoint for which room is reserved, in use by the caller; or returns why there is none."""
        key = (chain.remote.peer, path)
        try:
            for endpoint in evicted:
                endpoint.close(hard=False)
            endpoint = self.connect(chain.remote, path, chain.deadline, replaces)
        except BaseException as error:
            with self._lock:
                self._uncount(key)
                self._serve()
            outcome = dial_failure(error, chain.deadline, self._clock())
            if outcome is None:
                raise
            return outcome
        self._add(key, endpoint)
        return endpoint

    def _add(self, key: EndpointKey, endpoint: E) -> None:
        with self._lock:
            endpoint.key, endpoint.leaving = key, self._closed
            self._queue.append(endpoint)
            endpoint.shelf = self._free.setdefault(key, [])

    def release(self, endpoint: E) -> None:
        """Takes back an endpoint and keeps it for the next user, unless it was aborted or its path was forgotten."""
        if endpoint.leaving or endpoint.aborted:
            self._close(endpoint, hard=endpoint.aborted)
            return
        endpoint.free_since = self._clock()
        endpoint.shelf.append(endpoint)
        if endpoint.leaving:  # checked again: a thread that forgets the path meanwhile may have looked before
            self._retire(endpoint)
        elif self._waiters:
            with self._lock:
                self._serve()

    def discard(self, endpoint: E) -> None:
        """Closes and strikes off an endpoint that broke in its user's hands."""
        self._close(endpoint, hard=True)

    def disown(self, endpoint: E) -> None:
        """Ends the link of an endpoint whose user does not respond, and forgets it.

        The user closes the endpoint if it ever goes on. Until then the descriptor stays taken: the user's event loop
        would mistake the next file of that number for it."""
        endpoint.abort()
        self._strike(endpoint)

    def _close(self, endpoint: E, *, hard: bool) -> None:
        try:
            endpoint.close(hard=hard)
        finally:
            self._strike(endpoint)

    def _strike(self, endpoint: E) -> None:
        with self._lock:
            if endpoint in self._queue:
                self._drop(endpoint)
                self._serve()

    def _drop(self, endpoint: E) -> None:
        """Takes the endpoint out of all books. Lock held."""
        place = self._queue.index(endpoint)
        del self._queue[place]
        if place < self._hand:
            self._hand -= 1
        elif self._hand == len(self._queue):  # what comes next is newer than all that the hand has passed
            self._hand = 0
        if endpoint.key is not None:
            self._uncount(endpoint.key)

    def _uncount(self, key: EndpointKey) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self._free.pop(key, None)

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
            evicted = self._find(key, fresh=True)
        if not isinstance(evicted, list):
            endpoint.close(hard=False)
            return True
        self._add(key, endpoint)
        self.release(endpoint)
        for each in evicted:
            each.close(hard=False)
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        """Forgets a path as ``Transport.forget`` says."""
        self.forget_if(lambda key: key == (remote.peer, path))

    def forget_if(self, failed: Callable[[EndpointKey], bool]) -> None:
        """Forgets, like ``forget``, all paths for which ``failed`` is true; endpoints in use leave when released."""
        with self._lock:
            concerned = [endpoint for endpoint in self._queue if endpoint.key is not None and failed(endpoint.key)]
        for endpoint in concerned:
            endpoint.leaving = True
        for endpoint in concerned:
            self._retire(endpoint)

    def _all_free(self) -> list[E]:
        return [endpoint for free in list(self._free.values()) for endpoint in list(free)]

    def _victim(self) -> E | None:
        """Returns the free endpoint to evict by SIEVE, or None if all are in use. The hand goes from older to newer
        ones, clears the mark of each that was used again, and stops at the first without a mark. Lock held."""
        for _ in range(2 * len(self._queue)):
            endpoint = self._queue[self._hand]
            if endpoint in endpoint.shelf:
                if not endpoint.visited:
                    return endpoint
                endpoint.visited = False
            self._hand = (self._hand + 1) % len(self._queue)
        return None

    def _retire(self, endpoint: E) -> None:
        """Closes an endpoint that nobody uses; does nothing if a thread has taken it meanwhile."""
        if endpoint.take():
            self._close(endpoint, hard=False)

    def maintain(self, now: float) -> None:
        """Maintains as ``Transport.maintain`` says."""
        for endpoint in self._all_free():
            if now - endpoint.free_since >= self._limits.idle_s:
                self._retire(endpoint)

    @property
    def endpoints(self) -> int:
        """Number of endpoints open towards peers."""
        return len(self._queue)

    def close(self) -> None:
        """Closes all endpoints as ``Transport.close`` says."""
        self._closed = True
        with self._lock:
            self._lock.notify_all()
        self.forget_if(lambda _: True)


class _Waiter(Generic[E]):
    """A chain that waits for an endpoint, or, if it is to be ``fresh``, for room for one."""

    __slots__ = ("found", "fresh", "key")

    def __init__(self, key: EndpointKey, fresh: bool) -> None:
        self.key, self.fresh = key, fresh
        self.found: E | list[E] | None = None
        """The endpoint or the room that was handed to it, as ``Endpoints._find`` gives it."""


class ShortWay:
    """A path that is alone in the best tier between two memory locations, and whose endpoints move requests themselves.

    Its rate decides nothing, and is not measured."""

    __slots__ = ("endpoints", "key", "open", "path")

    def __init__(self, key: EndpointKey, endpoints: Endpoints[Any]) -> None:
        self.key = key
        self.path = key[1]
        self.endpoints = endpoints
        self.open = True
        """True while nothing is known to be wrong with it. Once it is shut it stays so."""
