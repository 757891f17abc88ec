"""The ways to one peer: which path each chain takes, in which thread it runs, where it goes when that path fails.

A chain is given to a path only when the path has room for it. The rest waits in one queue, which so feeds whichever
path is fast: slices spread over NICs by measured speed, and a slow or dying NIC holds few of them (Mooncake §3.2.3).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pinyon.transfer.chain import SHUTDOWN, Chain, Outcome
from pinyon.transfer.memory.buffers import HOST_PREFIX
from pinyon.transfer.path import Path, Tiers
from pinyon.transfer.paths.board import PathBoard, PathLimits, PathState
from pinyon.transfer.request import Reason, TransferStatus
from pinyon.transfer.segment import SegmentDescriptor
from pinyon.transfer.transports.staged import needs_staging, run_staged

if TYPE_CHECKING:
    from pinyon.transfer.paths.peers import Dispatcher

__all__ = ["Retired", "Routes"]

_log = logging.getLogger(__name__)
_NO_PATH = Outcome(TransferStatus.FAILED, Reason.NO_PATH)
_INTERNAL = Outcome(TransferStatus.FAILED, Reason.INTERNAL)
_EXPIRED = Outcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
_LANE_IDLE_S = 5.0
"""A thread without work ends after this time."""
_JUST_NOW_S = 1.0
"""A path that failed less than this ago is not tried as a last resort."""
_SILENT_S = 0.25
"""A deadline that passes sooner after a chain's start says nothing of its path."""
_MAX_LOCATION_PAIRS = 256
_MAX_REGIONS = 4096
"""Of a peer, about which is remembered what does not reach them."""
_SMALL_BYTES = 64 << 10


class Retired(Exception):
    """Closed for want of use just before a chain came: the peer gets new routes."""


class _Lane:
    """A path's threads and the chains that were given to it."""

    __slots__ = ("chains", "idle", "room", "threads", "wake")

    def __init__(self, lock: threading.Lock, room: int) -> None:
        self.chains: deque[Chain] = deque()
        """No thread has taken them yet."""
        self.room = room
        """How many more chains the path takes now."""
        self.threads: set[threading.Thread] = set()
        self.idle = 0
        self.wake = threading.Condition(lock)


class Routes:
    """All methods are thread-safe. Underscored ones want the lock held, except those that run, fail or end chains."""

    def __init__(self, dispatcher: Dispatcher, remote: SegmentDescriptor) -> None:
        self._dispatcher = dispatcher
        self._remote = remote
        self._lock = threading.Lock()
        self._board = PathBoard(PathLimits(), dispatcher.rng)
        self._waiting: dict[tuple[str, str], deque[Chain]] = {}
        """By memory locations, none empty: what waits for a busy NIC does not hold up what wants another one."""
        self._running: dict[Chain, Path] = {}
        """Given to a path, whether a thread has taken them or not."""
        self._tiers: dict[tuple[str, str], Tiers] = {}
        self._beyond: dict[bytes, frozenset[str]] = {}
        """Regions of the peer, and the transports that it says cannot reach them."""
        self._lanes: dict[Path, _Lane] = {}
        self._only: dict[tuple[str, str], tuple[Path, _Lane]] = {}
        """By memory locations, the one path of the best tier, as long as nothing is wrong with it: small chains are too
        short to be measured and have no choice, so they pass by the board."""
        self._failed_at: dict[Path, float] = {}
        self._last_failure = _NO_PATH
        self._closed = False
        self.last_used = time.monotonic()

    # --- choosing ---

    def learn(self, remote: SegmentDescriptor) -> None:
        """Use what ``remote`` says about the peer's addresses, if it says anything else than what we had."""
        mine = self._remote
        if remote is mine or (not remote.nics and not remote.shm):
            return
        if remote.nics == mine.nics and remote.shm == mine.shm and remote.topology == mine.topology:
            return
        with self._lock:
            self._remote = remote
            self._tiers.clear()
            self._only.clear()

    def _tiers_of(self, chain: Chain) -> Tiers:
        where = (chain.local_location, chain.remote_location)
        tiers = self._tiers.get(where)
        if tiers is None:
            if len(self._tiers) >= _MAX_LOCATION_PAIRS:
                self._tiers.clear()
                self._only.clear()
            tiers = self._tiers[where] = self._dispatcher.candidates(self._remote, *where)
        if self._beyond:
            useless = {name for part in chain.slices for name in self._beyond.get(part.remote_region, ())}
            tiers = tuple(tier for tier in tiers if tier[0].transport not in useless)
        return tiers

    def _lane(self, path: Path, tiers: Tiers) -> _Lane:
        lane = self._lanes.get(path)
        if lane is None:
            alike = next((len(tier) for tier in tiers if path in tier), 1)
            lane = self._lanes[path] = _Lane(self._lock, self._dispatcher.room(path, alike))
        return lane

    def _last_resort(self, chain: Chain, tiers: Tiers, now: float) -> Path | None:
        """All paths are avoided, but one may be back before its pause has ended: those that this chain did not try and
        that did not fail just now. And a connection that broke is made anew once, on the path that it broke on. A chain
        fails only when nothing is left to try."""
        for tier in tiers:
            for path in tier:
                if path not in chain.tried and now - self._failed_at.get(path, 0.0) >= _JUST_NOW_S:
                    return path
        if chain.attempts == 1 and chain.failure is not None and chain.failure.reason is Reason.CONNECTION_LOST:
            return next((path for tier in tiers for path in tier if path in chain.tried), None)
        return None

    def _queued(self) -> list[Chain]:
        return [chain for queue in self._waiting.values() for chain in queue]

    # --- giving chains to paths ---

    def submit(self, chain: Chain, *, inline: bool = False) -> Path | None:
        """Give the chain to a path, or queue it. ``inline``: if a path has room now, the caller must :meth:`run` the
        chain there (returned).

        Raises:
            Retired: nothing was done with the chain.
        """
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise Retired
            self.last_used = now
            if inline and chain.nbytes <= _SMALL_BYTES and not self._beyond:
                only = self._only.get((chain.local_location, chain.remote_location))
                if only is not None and only[1].room > 0:
                    only[1].room -= 1
                    chain.unbooked = True
                    chain.remote = self._remote
                    self._running[chain] = only[0]
                    return only[0]
            tiers = self._tiers_of(chain)
            # A fresh chain tries an avoided path too when there is no other: the peer may be back.
            path = self._board.choose(tiers, chain.nbytes) or self._board.choose_any(tiers, chain.nbytes, now)
            if path is not None:
                lane = self._lane(path, tiers)
                if lane.room <= 0:
                    self._wait(chain)
                    return None
                if inline:
                    self._assign(chain, path, lane)
                    return path
                if self._hand_over(chain, path, lane):
                    return None
                refusal = _INTERNAL
            else:
                refusal = _NO_PATH
        chain.stop(refusal)
        return None

    def _wait(self, chain: Chain, *, first: bool = False) -> None:
        queue = self._waiting.setdefault((chain.local_location, chain.remote_location), deque())
        if first:
            queue.appendleft(chain)
        else:
            queue.append(chain)

    def _assign(self, chain: Chain, path: Path, lane: _Lane) -> None:
        lane.room -= 1
        chain.remote = self._remote  # whose NICs the path names
        self._running[chain] = path
        self._board.started(path, chain.nbytes)

    def _unassign(self, chain: Chain, path: Path) -> None:
        self._lanes[path].room += 1
        del self._running[chain]

    def _hand_over(self, chain: Chain, path: Path, lane: _Lane) -> bool:
        """To the lane's threads. False: there is none and none can be had."""
        self._assign(chain, path, lane)
        lane.chains.append(chain)
        if lane.idle >= len(lane.chains):
            lane.wake.notify()
            return True
        name = f"pinyon-transfer-out-{path.transport}"
        thread = threading.Thread(target=self._work, args=(path, lane), name=name, daemon=True)
        lane.threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            _log.error("no more threads for transfers: %s", error)
            lane.threads.discard(thread)
            if not lane.threads:
                lane.chains.remove(chain)
                self._unassign(chain, path)
                self._board.aborted(path, chain.nbytes)
                return False
        return True

    def _pump(self, now: float) -> list[Chain]:
        """Give waiting chains to paths with room. Returns those that no path is left for, to be ended."""
        hopeless: list[Chain] = []
        turns = deque(self._waiting)
        while turns:
            where = turns.popleft()
            queue = self._waiting[where]
            while queue and queue[0].done:
                queue.popleft()
            if not queue:
                del self._waiting[where]
                continue
            chain = queue[0]
            tiers = self._tiers_of(chain)
            path = self._board.choose(tiers, chain.nbytes) or self._last_resort(chain, tiers, now)
            if path is None:
                if self._carries(tiers):  # what runs may bring an avoided path back, or fail too
                    continue
                hopeless.append(queue.popleft())
            else:
                lane = self._lane(path, tiers)
                if lane.room <= 0:
                    continue
                queue.popleft()
                if not self._hand_over(chain, path, lane):
                    chain.failure = _INTERNAL
                    hopeless.append(chain)
                self._waiting[where] = self._waiting.pop(where)  # next time others are first
            turns.append(where)
        return hopeless

    def _carries(self, tiers: Tiers) -> bool:
        """Does anything run on one of these paths?"""
        carrying = set(self._running.values())
        return any(path in carrying for tier in tiers for path in tier)

    # --- running ---

    def _work(self, path: Path, lane: _Lane) -> None:
        try:
            while True:
                with self._lock:
                    while not lane.chains:
                        if self._closed:
                            return
                        lane.idle += 1
                        notified = lane.wake.wait(_LANE_IDLE_S)
                        lane.idle -= 1
                        if not notified and not lane.chains:
                            lane.threads.discard(threading.current_thread())
                            return
                    chain = lane.chains.popleft()
                self.run(chain, path)
                del chain  # an idle thread must not keep the last chain's buffers alive
        finally:
            with self._lock:
                lane.threads.discard(threading.current_thread())

    def run(self, chain: Chain, path: Path) -> None:
        """Run a chain that was given to this path, in the calling thread. After it the chain is done or on its way over
        another path."""
        started = time.monotonic()
        outcome = _INTERNAL
        try:
            transport = self._dispatcher.transports[path.transport]
            if chain.local_location.startswith(HOST_PREFIX) or not needs_staging(chain, path):
                outcome = transport.run(chain, path)
            else:
                outcome = run_staged(transport, chain, path, self._dispatcher.staging)
        except Exception:
            _log.exception("a transfer chain ended in a defect")
        finally:  # also when a signal handler raises in a blocking caller's thread
            self._ran(chain, path, outcome, started)

    def _ran(self, chain: Chain, path: Path, outcome: Outcome, started: float) -> None:
        if outcome is _INTERNAL:
            chain.interrupt()  # its endpoint, if it still has one, must not go on
        now = time.monotonic()
        completed = outcome.status is TransferStatus.COMPLETED
        if not completed and self._no_progress(chain, outcome, now - started):
            self._path_failed(chain, path, outcome, started, now, final=True)
            return
        if not completed and outcome.reason.is_path_failure and not chain.stopped:
            # A peer on this host that does not answer is frozen itself: no other path would help.
            self._path_failed(
                chain, path, outcome, started, now, final=path.transport == "shm" and outcome.reason is Reason.STALLED
            )
            return
        if outcome.refusals is not None and Reason.OTHER_TRANSPORT in outcome.refusals and not chain.stopped:
            self._reroute(chain, path, outcome.refusals, now)
            return
        hopeless: list[Chain] = []
        with self._lock:
            self._unassign(chain, path)
            if completed and not chain.unbooked:
                self._board.completed(path, chain.nbytes, now - started, now)
                self._learn_only(chain, path)
            elif not chain.unbooked:
                self._board.aborted(path, chain.nbytes)
            if self._waiting:
                hopeless = self._pump(now)
        if completed:
            self._dispatcher.record(path, _moved(chain, outcome), now - started)
        chain.finish(outcome)
        self._end(hopeless)

    def _no_progress(self, chain: Chain, outcome: Outcome, elapsed_s: float) -> bool:
        """The deadline was sooner than the stall limit, but late enough for a path that works: else a caller with short
        deadlines would lose a share of its requests to a dead path for ever."""
        late = outcome.reason is Reason.DEADLINE or chain.expired
        return late and elapsed_s > _SILENT_S and chain.nbytes < elapsed_s * self._dispatcher.limits.min_rate_bytes_s

    def _learn_only(self, chain: Chain, path: Path) -> None:
        where = (chain.local_location, chain.remote_location)
        if where in self._only or not self._board.usable(path):
            return
        if self._tiers.get(where, ())[:1] == ((path,),):
            self._only[where] = (path, self._lanes[path])

    def _reroute(self, chain: Chain, path: Path, refusals: bytes, now: float) -> None:
        """This transport cannot reach the memory: another one must. What was moved is moved again."""
        chain.failure = _NO_PATH
        with self._lock:
            self._unassign(chain, path)
            if chain.unbooked:
                chain.unbooked = False
            else:
                self._board.aborted(path, chain.nbytes)
            if len(self._beyond) >= _MAX_REGIONS:
                self._beyond.clear()
            for part, code in zip(chain.slices, refusals, strict=True):
                if code == Reason.OTHER_TRANSPORT:
                    key = part.remote_region
                    self._beyond[key] = self._beyond.get(key, frozenset()) | {path.transport}
            retry = not self._closed
            if retry:
                self._wait(chain, first=True)
            hopeless = self._pump(now)
        if not retry:
            chain.finish(SHUTDOWN)
        self._end(hopeless)

    def _path_failed(
        self, chain: Chain, path: Path, outcome: Outcome, started: float, now: float, *, final: bool
    ) -> None:
        dispatcher = self._dispatcher
        try:
            dispatcher.transports[path.transport].forget(chain.remote, path)
        except Exception:
            _log.exception("closing a failed path's connections ended in a defect")
        chain.attempts += 1
        chain.failure = outcome
        retry = not final and now < chain.deadline and chain.attempts < dispatcher.limits.max_attempts
        with self._lock:
            self._unassign(chain, path)
            self._only.clear()
            if chain.unbooked:
                chain.unbooked = False
                self._board.started(path, chain.nbytes)
            chain.tried |= {path}
            self._board.failed(path, chain.nbytes, now - started, now)
            self._failed_at[path] = now
            self._last_failure = outcome
            if retry and not self._closed:
                self._wait(chain, first=True)
            else:
                retry = False
            self._recall(path)
            hopeless = self._pump(now)
        dispatcher.record_failure(path, outcome.reason, retried=retry and chain not in hopeless)
        if not retry:
            chain.finish(outcome)
        self._end(hopeless)

    def _recall(self, path: Path) -> None:
        """What the path's threads have not taken yet can go another way."""
        lane = self._lanes.get(path)
        while lane is not None and lane.chains:
            chain = lane.chains.pop()
            self._unassign(chain, path)
            self._board.aborted(path, chain.nbytes)
            self._wait(chain, first=True)

    # --- health ---

    def nic_down(self, name: str) -> None:
        """The link monitor says so: what runs over this NIC goes another way at once."""
        now = time.monotonic()
        with self._lock:
            self._only.clear()
            self._board.nic_down(name)
            for path in self._lanes:
                if path.local_nic == name:
                    self._recall(path)
            for chain, path in self._running.items():
                if path.local_nic == name:
                    chain.interrupt()  # under the lock: not when it has gone over to a sound path meanwhile
            hopeless = self._pump(now)
        self._end(hopeless)

    def nic_up(self, name: str) -> None:
        """What failed over this NIC may be tried again, after a probe or as a last resort."""
        with self._lock:
            self._board.nic_up(name, time.monotonic())
            for path in [path for path in self._failed_at if path.local_nic == name]:
                del self._failed_at[path]
            for chain in [*self._running, *self._queued()]:
                chain.tried = frozenset(path for path in chain.tried if path.local_nic != name)

    def due_probes(self, now: float, most: int) -> list[Path]:
        """Avoided paths to be probed now, at most so many; each must then be given to :meth:`probe`."""
        with self._lock:
            due = self._board.due_probes(now)[:most]
            for path in due:
                self._board.probe_started(path, now)
            return due

    def probe(self, path: Path, deadline: float) -> None:
        """Try an avoided path with a connection of its own, so that no chain has to."""
        alive = False
        try:
            alive = self._dispatcher.transports[path.transport].probe(self._remote, path, deadline)
        except Exception:
            _log.exception("probing a transfer path ended in a defect")
        now = time.monotonic()
        with self._lock:
            if alive:
                self._board.recovered(path)
            else:
                self._board.probe_failed(path, now)
            hopeless = self._pump(now)
        self._end(hopeless)

    def expire(self, now: float) -> None:
        """End chains that wait beyond their deadline."""
        with self._lock:
            late = [chain for chain in self._queued() if now > chain.deadline]
        for chain in late:
            chain.stop(_EXPIRED)

    def retire(self, unused_since: float) -> bool:
        """Close, if nothing runs or waits and no chain came after that time. From then on ``submit`` raises."""
        with self._lock:
            if self._running or self._waiting or self.last_used > unused_since:
                return False
            self._close()
            return True

    def snapshot(self) -> list[PathState]:
        with self._lock:
            return self._board.snapshot()

    def close(self) -> list[threading.Thread]:
        """Take nothing more, stop what waits and what runs; returns the threads to join."""
        with self._lock:
            for path in self._lanes:
                self._recall(path)
            left = [*self._running, *self._queued()]
            self._waiting.clear()
            threads = self._close()
        for chain in left:
            chain.stop(SHUTDOWN)
        return threads

    def _close(self) -> list[threading.Thread]:
        self._closed = True
        for lane in self._lanes.values():
            lane.wake.notify_all()
        return [thread for lane in self._lanes.values() for thread in lane.threads]

    def _end(self, hopeless: list[Chain]) -> None:
        """Chains that no path is left for end as the last attempt did, their own or another's."""
        for chain in hopeless:
            chain.finish(chain.failure or self._last_failure)


def _moved(chain: Chain, outcome: Outcome) -> int:
    if outcome.refusals is None:
        return chain.nbytes
    return sum(part.length for part, code in zip(chain.slices, outcome.refusals, strict=True) if not code)
