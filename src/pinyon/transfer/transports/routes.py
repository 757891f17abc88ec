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

from pinyon.transfer.path_board import PathBoard, PathLimits, PathState
from pinyon.transfer.paths import Path, Tiers
from pinyon.transfer.request import Reason, TransferStatus
from pinyon.transfer.segment import SegmentDescriptor
from pinyon.transfer.transports.base import SHUTDOWN, Chain, Outcome

if TYPE_CHECKING:
    from pinyon.transfer.transports.dispatcher import Dispatcher

__all__ = ["Routes"]

_log = logging.getLogger(__name__)
_NO_PATH = Outcome(TransferStatus.FAILED, Reason.NO_PATH)
_INTERNAL = Outcome(TransferStatus.FAILED, Reason.INTERNAL)
_EXPIRED = Outcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
_LANE_IDLE_S = 5.0
"""A thread without work ends after this time."""
_JUST_NOW_S = 1.0
"""A path that failed less than this ago is not tried as a last resort."""
_MAX_LOCATION_PAIRS = 256


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
    """All methods are thread-safe. Underscored ones want the lock held, except ``_work`` and ``_path_failed``."""

    def __init__(self, dispatcher: Dispatcher, remote: SegmentDescriptor) -> None:
        self._dispatcher = dispatcher
        self._remote = remote
        self._lock = threading.Lock()
        self._board = PathBoard(PathLimits(), dispatcher.rng)
        self._waiting: deque[Chain] = deque()
        self._running: dict[Chain, Path] = {}
        """Given to a path, whether a thread has taken them or not."""
        self._tiers: dict[tuple[str, str], Tiers] = {}
        self._lanes: dict[Path, _Lane] = {}
        self._failed_at: dict[Path, float] = {}
        self._last_failure = _NO_PATH
        self._closed = False
        self.last_used = time.monotonic()

    # --- choosing ---

    def learn(self, remote: SegmentDescriptor) -> SegmentDescriptor:
        """The descriptor that says more about the peer's addresses: ``remote`` or the one we had."""
        mine = self._remote
        if remote is mine:
            return mine
        if remote.nics == mine.nics and remote.shm == mine.shm and remote.topology == mine.topology:
            return remote
        if not remote.nics and not remote.shm:
            return mine
        with self._lock:
            self._remote = remote
            self._tiers.clear()
        return remote

    def _tiers_of(self, chain: Chain) -> Tiers:
        where = (chain.local_location, chain.remote_location)
        tiers = self._tiers.get(where)
        if tiers is None:
            if len(self._tiers) >= _MAX_LOCATION_PAIRS:
                self._tiers.clear()
            tiers = self._tiers[where] = self._dispatcher.candidates(self._remote, *where)
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

    # --- giving chains to paths ---

    def submit(self, chain: Chain, *, inline: bool = False) -> Path | None:
        """Give the chain to a path, or queue it. ``inline``: if a path has room now, the caller must :meth:`run` the
        chain there (returned)."""
        now = time.monotonic()
        with self._lock:
            self.last_used = now
            if self._closed:
                refusal = SHUTDOWN
            else:
                tiers = self._tiers_of(chain)
                # A fresh chain tries an avoided path too when there is no other: the peer may be back.
                path = self._board.choose(tiers, chain.nbytes) or self._board.choose_any(tiers, chain.nbytes, now)
                if path is not None:
                    lane = self._lane(path, tiers)
                    if lane.room <= 0:
                        self._waiting.append(chain)
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

    def _assign(self, chain: Chain, path: Path, lane: _Lane) -> None:
        lane.room -= 1
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
        while self._waiting:
            chain = self._waiting[0]
            if chain.done:
                self._waiting.popleft()
                continue
            tiers = self._tiers_of(chain)
            path = self._board.choose(tiers, chain.nbytes)
            if path is None:
                path = self._last_resort(chain, tiers, now)
            if path is None:
                if self._running:  # what runs may bring an avoided path back, or fail too
                    break
                hopeless.append(self._waiting.popleft())
                continue
            lane = self._lane(path, tiers)
            if lane.room <= 0:
                break
            self._waiting.popleft()
            if not self._hand_over(chain, path, lane):
                hopeless.append(chain)
        return hopeless

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
        try:
            outcome = self._dispatcher.transports[path.transport].run(chain, path)
        except Exception:
            _log.exception("a transfer chain ended in a defect")
            outcome = _INTERNAL
        now = time.monotonic()
        completed = outcome.status is TransferStatus.COMPLETED
        if not completed and outcome.reason.is_path_failure and not chain.stopped:
            # A peer on this host that does not answer is frozen itself: no other path would help.
            self._path_failed(
                chain, path, outcome, started, now, final=path.transport == "shm" and outcome.reason is Reason.STALLED
            )
            return
        hopeless: list[Chain] = []
        with self._lock:
            self._unassign(chain, path)
            if completed:
                self._board.completed(path, chain.nbytes, now - started, now)
            else:
                self._board.aborted(path, chain.nbytes)
            if self._waiting:
                hopeless = self._pump(now)
        if completed:
            self._dispatcher.record(path, _moved(chain, outcome), now - started)
        chain.finish(outcome)
        self._end(hopeless)

    def _path_failed(
        self, chain: Chain, path: Path, outcome: Outcome, started: float, now: float, *, final: bool
    ) -> None:
        dispatcher = self._dispatcher
        dispatcher.transports[path.transport].forget(chain.remote, path)
        chain.attempts += 1
        chain.tried |= {path}
        chain.failure = outcome
        retry = not final and now < chain.deadline and chain.attempts < dispatcher.limits.max_attempts
        with self._lock:
            self._unassign(chain, path)
            self._board.failed(path, chain.nbytes, now - started, now)
            self._failed_at[path] = now
            self._last_failure = outcome
            if retry and not self._closed:
                self._waiting.appendleft(chain)
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
            self._waiting.appendleft(chain)

    # --- health ---

    def nic_down(self, name: str) -> None:
        """The link monitor says so: what runs over this NIC goes another way at once."""
        now = time.monotonic()
        with self._lock:
            self._board.nic_down(name)
            for path in self._lanes:
                if path.local_nic == name:
                    self._recall(path)
            victims = [chain for chain, path in self._running.items() if path.local_nic == name]
            hopeless = self._pump(now)
        for chain in victims:
            chain.interrupt()
        self._end(hopeless)

    def nic_up(self, name: str) -> None:
        with self._lock:
            self._board.nic_up(name, time.monotonic())

    def due_probes(self, now: float, most: int) -> list[Path]:
        """Avoided paths to be probed now, at most so many; each must be answered by :meth:`probed`."""
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

    def expire(self, now: float) -> bool:
        """End chains that wait beyond their deadline. True: nothing has happened here for ``idle_s``."""
        with self._lock:
            late = [chain for chain in self._waiting if now > chain.deadline]
            idle = not self._running and not self._waiting and now - self.last_used > self._dispatcher.limits.idle_s
        for chain in late:
            chain.stop(_EXPIRED)
        return idle

    def snapshot(self) -> list[PathState]:
        with self._lock:
            return self._board.snapshot()

    def close(self) -> list[threading.Thread]:
        """Take nothing more, end what waits; returns the threads to join, whose chains the owner must have stopped."""
        with self._lock:
            self._closed = True
            for path in self._lanes:
                self._recall(path)
            left = list(self._waiting)
            self._waiting.clear()
            threads = [thread for lane in self._lanes.values() for thread in lane.threads]
            for lane in self._lanes.values():
                lane.wake.notify_all()
        for chain in left:
            chain.stop(SHUTDOWN)
        return threads

    def _end(self, hopeless: list[Chain]) -> None:
        """Chains that no path is left for end as the last attempt did, their own or another's."""
        for chain in hopeless:
            chain.finish(chain.failure or self._last_failure)


def _moved(chain: Chain, outcome: Outcome) -> int:
    if outcome.refusals is None:
        return chain.nbytes
    return sum(part.length for part, code in zip(chain.slices, outcome.refusals, strict=True) if not code)
