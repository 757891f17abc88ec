"""What transports do alike whose chains run over endpoints: keep them, wait for one, replace what broke.

Mooncake §3.2.3, endpoint management. The books are :class:`EndpointPool`'s; here are the lock, the waits and the ends.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from pinyon.core.clock import Clock
from pinyon.transfer.chain import BAD_BYTES, GONE, LATE, LOST, NO_CONNECTION, NO_ROOM, SHUTDOWN, STALLED, Chain, Outcome
from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.links.dialer import Link, dial_failure
from pinyon.transfer.links.endpoint_pool import EndpointPool
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.path import Path
from pinyon.transfer.request import Opcode, TransferStatus
from pinyon.transfer.segment import PeerId, SegmentDescriptor
from pinyon.transfer.stats import Meter

__all__ = ["Endpoint", "Endpoints", "TryAgain"]

_log = logging.getLogger(__name__)
_TRIES = 3
"""Endpoints that one run may use up: one that the peer had closed, and when what it granted has changed."""
_WAIT_S = 0.25
"""A chain that waits for an endpoint notices within this time that it was ended."""

_Key = tuple[PeerId, Path]


class TryAgain(Exception):
    """The endpoint broke in mid-transfer, but a fresh one may do: the peer ended its link, or took a grant back."""


class Endpoint(ABC):
    """A link to a peer and what goes with it. One chain at a time uses it; only ``abort`` may be called from others."""

    __slots__ = ("aborted", "answered", "link", "reused")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.aborted = False
        """It is of no use any more."""
        self.answered = False
        """Did any byte of an answer arrive for the present chain?"""
        self.reused = False
        """It has been idle, so the peer may have closed it meanwhile."""

    def is_open(self) -> bool:
        """After it sat idle, as far as can be known without asking the peer."""
        return not self.aborted

    def prepare(self, chain: Chain) -> None:
        """What is to be done before the chain's memory is touched. Raises like ``exchange``."""
        return

    @abstractmethod
    def exchange(self, chain: Chain) -> Outcome:
        """Move the chain, which is claimed. An exception or a failure leaves the endpoint unusable.

        Raises:
            TryAgain, WireError, OSError (the link broke), Stalled, DeadlineReached
        """

    def abort(self) -> None:
        """Make its user stop soon; from any thread, any number of times."""
        self.aborted = True
        self.link.stream.abort()

    def close(self, *, hard: bool) -> None:
        """On return it touches no memory. ``hard``: after a failure, so that nothing trickles on to the peer."""
        self.link.stream.close(hard=hard)


E = TypeVar("E", bound=Endpoint)


class Endpoints(ABC, Generic[E]):
    """The ``Transport`` methods of those transports. One with as many endpoints as it may have lets chains wait.

    All methods are thread-safe.
    """

    def __init__(self, cap_per_path: int, limits: TransferLimits, meter: Meter, clock: Clock = time.monotonic) -> None:
        """``cap_per_path`` endpoints to one peer over one path, ``limits.max_endpoints`` in all."""
        self._limits = limits
        self._meter = meter
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pool: EndpointPool[_Key, E] = EndpointPool(limits.max_endpoints, cap_per_path)
        self.waiting = 0
        """Chains that wait for an endpoint now."""

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
            except TryAgain:
                outcome, again, midway = LOST, True, True
            except Stalled:
                outcome = STALLED
            except DeadlineReached:
                outcome = LATE
            except WireError as error:
                _log.info("a peer broke the protocol of a transfer link: %s", error)
                outcome = BAD_BYTES
            except OSError:
                outcome, again = LOST, endpoint.reused and not endpoint.answered
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
                self._meter.retries += 1
        return outcome

    def lease(self, chain: Chain, path: Path, replaces: int = 0) -> E | Outcome:
        """An endpoint that nobody else uses, a new one if it is to replace another; or why there is none.

        When all that there may be are in use, it waits until one is released, the chain ends, or its deadline passes:
        that is not the path's fault.
        """
        key = (chain.remote.peer, path)
        while True:
            with self._lock:
                found = self._find(chain, key, fresh=replaces != 0)
            if isinstance(found, list):
                return self._make(chain, path, replaces, found)
            if isinstance(found, Outcome):
                return found
            if found.is_open():
                found.reused = True
                return found
            self.discard(found)

    def _find(self, chain: Chain, key: _Key, *, fresh: bool) -> E | list[E] | Outcome:
        """Lock held. An idle endpoint; or those that made room for a new one, to be closed; or why there is neither."""
        pool = self._pool
        while True:
            endpoint = None if fresh else pool.lease(key)
            if endpoint is not None:
                return endpoint
            evicted = pool.reserve(key)
            if evicted is not None:
                return evicted
            if pool.closed:
                return SHUTDOWN
            if chain.done:
                return GONE
            remaining = chain.deadline - self._clock()
            if remaining <= 0:
                return NO_ROOM
            self.waiting += 1
            try:
                self._changed.wait(min(remaining, _WAIT_S))
            finally:
                self.waiting -= 1

    def _make(self, chain: Chain, path: Path, replaces: int, evicted: list[E]) -> E | Outcome:
        """A new endpoint, in use by the caller, for which there is room; or why there is none."""
        key = (chain.remote.peer, path)
        _close(evicted)
        try:
            endpoint = self.connect(chain.remote, path, chain.deadline, replaces)
        except BaseException as error:
            with self._lock:
                self._pool.cancel(key)
                self._changed.notify_all()
            outcome = dial_failure(error, chain.deadline, self._clock())
            if outcome is None:
                raise
            return outcome
        with self._lock:
            self._pool.add(key, endpoint)
        return endpoint

    def release(self, endpoint: E) -> None:
        """Its user is done with it: it is kept for the next one, unless it was aborted or its path was forgotten."""
        with self._lock:
            kept = self._pool.release(endpoint, self._clock())
            if kept and endpoint.aborted:
                kept = not self._pool.discard(endpoint)
            if self.waiting:
                self._changed.notify_all()  # each may wait for another path
        if not kept:
            endpoint.close(hard=endpoint.aborted)

    def discard(self, endpoint: E) -> None:
        """It broke in its user's hands."""
        endpoint.close(hard=True)
        with self._lock:
            self._pool.discard(endpoint)
            self._changed.notify_all()

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
                self._pool.add(key, endpoint)
        if evicted is None:
            endpoint.close(hard=False)
        else:
            _close(evicted)
            self.release(endpoint)
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        """See ``Transport.forget``."""
        with self._lock:
            dropped = self._pool.drop((remote.peer, path))
            self._changed.notify_all()
        _close(dropped)

    def forget_nics(self, names: Iterable[str]) -> None:
        """Like ``forget`` for all paths over these local NICs."""
        gone = set(names)
        with self._lock:
            dropped = self._pool.drop_if(lambda key: key[1].local_nic in gone)
            self._changed.notify_all()
        _close(dropped)

    def maintain(self, now: float) -> None:
        """See ``Transport.maintain``."""
        with self._lock:
            expired = self._pool.expire(now, self._limits.idle_s)
            self._changed.notify_all()
        _close(expired)

    @property
    def endpoints(self) -> int:
        """Open towards peers."""
        return self._pool.open

    @property
    def evictions(self) -> int:
        """Endpoints closed to make room for others, so far."""
        return self._pool.evictions

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._lock:
            left = self._pool.close()
            self._changed.notify_all()
        _close(left)


def _close(endpoints: Iterable[Endpoint]) -> None:
    for endpoint in endpoints:
        endpoint.close(hard=False)
