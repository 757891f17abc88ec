"""One peer: the path of each of its chains, the queue of waiting chains, and other paths for chains that failed.

A chain is given to a path only when the path has room for it; the rest waits in one queue. So the queue feeds whichever
path is fast: slices spread over NICs by measured speed, and a slow or dying NIC holds few of them (Mooncake §3.2.3)."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Mapping

from pinyon.transfer.chains.chain import INTERNAL, LATE, NO_ROOM, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.endpoints import Endpoints, ShortWay
from pinyon.transfer.memory.buffers import HOST_PREFIX
from pinyon.transfer.paths.board import PathBoard, PathState
from pinyon.transfer.paths.reach import Reach
from pinyon.transfer.paths.workers import Workers
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.transports.staged import needs_staging, run_staged
from pinyon.transfer.types.nic import Path, Tiers
from pinyon.transfer.types.request import Reason, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

_log = logging.getLogger(__name__)
_DEFECT = ChainOutcome(TransferStatus.FAILED, Reason.INTERNAL)
_NO_PATH = ChainOutcome(TransferStatus.FAILED, Reason.NO_PATH)
_SILENT_S = 0.25
"""Time since a chain's start within which a passed deadline says nothing about its path."""
_MAX_LOCATION_PAIRS = 256
_MAX_REGIONS = 4096
"""Regions of a peer for which the transports that do not reach them are remembered."""
_JUST_NOW_S = 1.0
"""A path that failed less than this ago is not tried as a last resort."""


class Peer:
    """One peer's chains and paths. Thread-safe.

    Private methods down to :meth:`_hand_over` want the lock held. One that returns *hopeless* chains leaves it to the
    caller to :meth:`_end` them without the lock."""

    def __init__(
        self,
        context: EngineContext,
        remote: SegmentDescriptor,
        reach: Reach,
        transports: Mapping[str, Transport],
        workers: Workers,
        rng: random.Random,
    ) -> None:
        self._reach = reach
        self._limits = context.limits
        self._transports = transports
        self._workers = workers
        self._meter = context.meter
        self._staging = context.memory.staging_out
        self._clock = context.clock
        self.lock = threading.Lock()
        """The lock of all that follows."""
        self.remote = remote
        """The descriptor that says most about the peer's addresses."""
        self._tiers: dict[tuple[str, str], Tiers] = {}
        """The paths by memory locations."""
        self._beyond: dict[bytes, frozenset[str]] = {}
        """Transports that, as the peer says, cannot reach a region of it, by the region's key."""
        self.board = PathBoard(rng)
        self.running: dict[Chain, Path] = {}
        """Chains given to a path, whether a thread has taken them or not."""
        self.room: dict[Path, int] = {}
        """Number of further chains that each path takes now."""
        self._last_failure = _NO_PATH
        self._waiting: dict[tuple[str, str], deque[Chain]] = {}
        """Waiting chains by memory locations; no queue is empty.

        Chains that wait for a busy NIC do not hold up chains that want another one."""
        self._short: dict[tuple[str, str], ShortWay] = {}
        """Short ways by memory locations, while nothing is wrong with them."""
        self._failed_at: dict[Path, float] = {}
        self._closed = False
        self.last_used = self._clock()

    # --- one request, by its caller ---

    def short_way(self, remote: SegmentDescriptor, local_location: str, remote_location: str) -> ShortWay | None:
        """Returns the short way, or None if there is none now or ``remote`` has news about the paths.

        Needs no lock: the user checks ``open`` once others can see that it uses the way."""
        if self._beyond or (remote is not self.remote and self._is_news(remote)):
            return None
        return self._short.get((local_location, remote_location))

    def adopt(self, chain: Chain, way: ShortWay, outcome: ChainOutcome, started: float) -> bool:
        """Adopts a chain for a request that ended with ``outcome`` on the short way, as if the chain had run there.

        Returns False if this peer is closed and nothing was done."""
        with self.lock:
            if self._closed:
                return False
            self._room(way.path, self.tiers(chain))
            self._assign(chain, way.path)
        self._ran(chain, way.path, outcome, started)
        return True

    def _learn_short(self, chain: Chain, path: Path) -> None:
        """Makes the path on which a chain has completed a short way, if it can be one. Lock held."""
        where = chain.local_location, chain.remote_location
        if where in self._short or not self.board.usable(path) or self.tiers(chain)[:1] != ((path,),):
            return
        transport = self._transports[path.transport]
        if isinstance(transport, Endpoints) and transport.moves_bytes:
            if len(self._short) >= _MAX_LOCATION_PAIRS:
                self._shut_short_ways()
            self._short[where] = ShortWay((self.remote.peer, path), transport)

    def _shut_short_ways(self) -> None:
        """Shuts the short ways, because they may be wrong now. Lock held."""
        for way in self._short.values():
            way.open = False
        self._short.clear()

    # --- choosing a path ---

    def learn(self, remote: SegmentDescriptor) -> None:
        """Learns what ``remote`` says about the peer's addresses, if that is new."""
        if remote is not self.remote and self._is_news(remote):
            with self.lock:
                self.remote = remote
                self._tiers.clear()
                self._shut_short_ways()

    def _is_news(self, remote: SegmentDescriptor) -> bool:
        """Returns whether ``remote`` says anything about the peer's addresses that is new. Needs no lock."""
        mine = self.remote
        if not remote.nics and not remote.shm:
            return False
        return remote.nics != mine.nics or remote.shm != mine.shm or remote.topology != mine.topology

    def tiers(self, chain: Chain) -> Tiers:
        """Returns the paths that reach all of the chain's memory, best first. Lock held."""
        where = chain.local_location, chain.remote_location
        tiers = self._tiers.get(where)
        if tiers is None:
            if len(self._tiers) >= _MAX_LOCATION_PAIRS:
                self._tiers.clear()
            tiers = self._tiers[where] = self._reach.tiers(self.remote, *where)
        if self._beyond:
            useless = {name for part in chain.slices for name in self._beyond.get(part.remote_region, ())}
            tiers = tuple(tier for tier in tiers if tier[0].transport not in useless)
        return tiers

    def carries(self, tiers: Tiers) -> bool:
        """Returns whether anything runs on one of these paths. Lock held."""
        carrying = set(self.running.values())
        return any(path in carrying for tier in tiers for path in tier)

    def waiting(self) -> list[Chain]:
        """Returns the waiting chains. Lock held."""
        return [chain for queue in self._waiting.values() for chain in queue]

    def _last_resort(self, chain: Chain, tiers: Tiers, now: float) -> Path | None:
        """Returns a path to try though all are avoided: one may be back before its pause has ended.

        It is a path that this chain did not try and that did not fail just now. A connection that broke is made anew
        once, on the path that it broke on. None means that nothing is left to try, and the chain fails."""
        for tier in tiers:
            for path in tier:
                if path not in chain.tried and now - self._failed_at.get(path, 0.0) >= _JUST_NOW_S:
                    return path
        if chain.attempts == 1 and chain.failure is not None and chain.failure.reason is Reason.CONNECTION_LOST:
            return next((path for tier in tiers for path in tier if path in chain.tried), None)
        return None

    # --- giving chains to paths ---

    def submit(self, chain: Chain, *, inline: bool = False) -> Path | None:
        """Gives a fresh chain to a path, or lets it wait.

        With ``inline`` and a path that has room now, returns that path: the caller must :meth:`run` the chain there."""
        now = self._clock()
        with self.lock:
            self.last_used = now
            given = SHUTDOWN if self._closed else self._give(chain, now, inline=inline)
        if isinstance(given, ChainOutcome):
            chain.stop(given)
            return None
        return given

    def _give(self, chain: Chain, now: float, *, inline: bool) -> Path | ChainOutcome | None:
        """Gives a fresh chain to a path as ``submit`` does; returns an outcome if there is no way. Lock held."""
        tiers = self.tiers(chain)
        # A fresh chain tries an avoided path too when there is no other: the peer may be back.
        path = self.board.choose_any(tiers, chain.nbytes, now)
        if path is None:
            return _NO_PATH
        if self._room(path, tiers) <= 0:
            self._wait(chain)
            return None
        if inline:
            self._assign(chain, path)
            return path
        return None if self._hand_over(chain, path) else INTERNAL

    def _pump(self, now: float) -> list[Chain]:
        """Gives waiting chains to paths with room; returns the hopeless, for which no path is left. Lock held."""
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
            tiers = self.tiers(chain)
            path = self.board.choose(tiers, chain.nbytes) or self._last_resort(chain, tiers, now)
            if path is None:
                if self.carries(tiers):  # running chains may bring an avoided path back, or fail too
                    continue
                hopeless.append(queue.popleft())
            else:
                if self._room(path, tiers) <= 0:
                    continue
                queue.popleft()
                if not self._hand_over(chain, path):
                    chain.failure = INTERNAL
                    hopeless.append(chain)
                self._waiting[where] = self._waiting.pop(where)  # next time another queue is first
            turns.append(where)
        return hopeless

    def _room(self, path: Path, tiers: Tiers) -> int:
        room = self.room.get(path)
        if room is None:
            alike = next((len(tier) for tier in tiers if path in tier), 1)
            room = self.room[path] = self._reach.room(path, alike, self.remote)
        return room

    def _wait(self, chain: Chain, *, first: bool = False) -> None:
        where = chain.local_location, chain.remote_location
        queue = self._waiting.setdefault(where, deque())
        (queue.appendleft if first else queue.append)(chain)

    def _assign(self, chain: Chain, path: Path) -> None:
        self.room[path] -= 1
        chain.remote = self.remote  # the descriptor that has the path's NICs
        self.running[chain] = path
        self.board.started(path, chain.nbytes)

    def _unassign(self, chain: Chain, path: Path) -> None:
        self.room[path] += 1
        del self.running[chain]

    def _withdraw(self, chain: Chain, path: Path) -> None:
        """Takes the chain from the path, with no verdict on the path."""
        self._unassign(chain, path)
        self.board.aborted(path, chain.nbytes)

    def _hand_over(self, chain: Chain, path: Path) -> bool:
        """Hands the chain to a thread; returns False if there is none and none can be had."""
        self._assign(chain, path)
        if self._workers.start(self.run, chain, path):
            return True
        self._withdraw(chain, path)
        return False

    # --- running chains, and their outcomes ---

    def run(self, chain: Chain, path: Path) -> None:
        """Runs a chain given to this path, in this thread; then it is done or on its way over another path."""
        started = self._clock()
        outcome = _DEFECT
        try:
            transport = self._transports[path.transport]
            if chain.local_location.startswith(HOST_PREFIX) or not needs_staging(chain, path):
                outcome = transport.run(chain, path)
            else:
                outcome = run_staged(transport, chain, path, self._staging)
        except Exception:
            _log.exception("a transfer chain ended in a defect")
        finally:  # also when a signal handler raises in a blocking caller's thread
            self._ran(chain, path, outcome, started)

    def _ran(self, chain: Chain, path: Path, outcome: ChainOutcome, started: float) -> None:
        if outcome is _DEFECT:
            chain.interrupt()  # its endpoint, if it still has one, must not go on
        now = self._clock()
        completed = outcome.status is TransferStatus.COMPLETED
        late = not completed and self._no_progress(chain, outcome, now - started)
        if late or (not completed and outcome.reason.is_path_failure and not chain.stopped):
            # A peer on this host that does not answer is itself frozen: no other path would help.
            frozen = path.transport == "shm" and outcome.reason is Reason.STALLED
            self._path_failed(chain, path, outcome, started, now, final=late or frozen)
            return
        if outcome.refusals is not None and Reason.OTHER_TRANSPORT in outcome.refusals and not chain.stopped:
            self._reroute(chain, path, outcome.refusals, now)
            return
        with self.lock:
            if completed:
                self._unassign(chain, path)
                self.board.completed(path, chain.nbytes, now - started, now)
                self._learn_short(chain, path)
            else:  # it was stopped, or failed for a reason that is not the path's
                self._withdraw(chain, path)
            hopeless = self._pump(now) if self._waiting else []
        if completed:
            with self._meter.lock:
                self._meter.path_completed(path, _moved(chain, outcome), now - started)
        chain.finish(outcome)
        self._end(hopeless)

    def _no_progress(self, chain: Chain, outcome: ChainOutcome, elapsed_s: float) -> bool:
        """Returns whether the deadline passed before the stall limit, but after a working path would have been done.

        Such a path has failed: otherwise a caller with short deadlines would lose requests to a dead path for ever."""
        late = outcome.reason is Reason.DEADLINE or chain.expired
        return (
            late
            and outcome is not NO_ROOM
            and elapsed_s > _SILENT_S
            and chain.nbytes < elapsed_s * self._limits.min_rate_bytes_s
        )

    def _reroute(self, chain: Chain, path: Path, refusals: bytes, now: float) -> None:
        """Moves a chain to another transport, as this one cannot reach its memory; what was moved is moved again."""
        with self.lock:
            self._withdraw(chain, path)
            chain.failure = _NO_PATH
            for part, code in zip(chain.slices, refusals, strict=True):
                if code == Reason.OTHER_TRANSPORT:
                    if len(self._beyond) >= _MAX_REGIONS:
                        self._beyond.clear()
                    known = self._beyond.get(part.remote_region, frozenset())
                    self._beyond[part.remote_region] = known | {path.transport}
            self._wait(chain, first=True)  # if it was stopped meanwhile, it is done and nobody takes it up
            hopeless = self._pump(now)
        self._end(hopeless)

    def _path_failed(
        self, chain: Chain, path: Path, outcome: ChainOutcome, started: float, now: float, *, final: bool
    ) -> None:
        """Marks the path as avoided from now on, and retries the chain unless ``final``."""
        try:
            self._transports[path.transport].forget(chain.remote, path)
        except Exception:
            _log.exception("closing a failed path's connections ended in a defect")
        chain.attempts += 1
        chain.failure = outcome
        retry = not final and now < chain.deadline and chain.attempts < self._limits.max_attempts
        with self.lock:
            self._unassign(chain, path)
            self._shut_short_ways()
            chain.tried |= {path}
            self.board.failed(path, chain.nbytes, now - started, now)
            self._failed_at[path] = now
            self._last_failure = outcome
            if retry:
                self._wait(chain, first=True)
            hopeless = self._pump(now)
        with self._meter.lock:
            self._meter.path_failed(path, outcome.reason, retry and chain not in hopeless)
        if not retry:
            chain.finish(outcome)
        self._end(hopeless)

    def _end(self, hopeless: list[Chain]) -> None:
        """Ends chains that no path is left for as the last attempt did, their own or another chain's."""
        for chain in hopeless:
            chain.finish(chain.failure or self._last_failure)

    # --- health ---

    def nic_down(self, name: str) -> None:
        """Moves chains that run over this NIC to other paths at once, because the link monitor saw it go down."""
        with self.lock:
            self._shut_short_ways()
            self.board.nic_down(name)
            for chain, path in self.running.items():
                if path.local_nic == name:
                    chain.interrupt()  # under the lock, so not after the chain has moved to a sound path
            hopeless = self._pump(self._clock())
        self._end(hopeless)

    def nic_up(self, name: str) -> None:
        """Lets paths that failed over this NIC be tried again, after a probe or as a last resort."""
        with self.lock:
            self.board.nic_up(name, self._clock())
            for path in [path for path in self._failed_at if path.local_nic == name]:
                del self._failed_at[path]
            for chain in [*self.running, *self.waiting()]:
                chain.tried = frozenset(path for path in chain.tried if path.local_nic != name)

    def due_probes(self, now: float, most: int) -> list[Path]:
        """Returns at most ``most`` avoided paths to probe now; each must then be given to :meth:`probe`."""
        with self.lock:
            return self.board.begin_probes(now, most)

    def probe(self, path: Path, deadline: float) -> None:
        """Tries an avoided path with a connection of its own, so that no chain has to."""
        alive = False
        try:
            alive = self._transports[path.transport].probe(self.remote, path, deadline)
        except Exception:
            _log.exception("probing a transfer path ended in a defect")
        now = self._clock()
        with self.lock:
            if alive:
                self.board.recovered(path)
            else:
                self.board.probe_failed(path, now)
            hopeless = self._pump(now)
        self._end(hopeless)

    def expire(self, now: float) -> None:
        """Ends chains that wait beyond their deadline."""
        with self.lock:
            late = [chain for chain in self.waiting() if now > chain.deadline]
        for chain in late:
            chain.stop(LATE)

    def snapshot(self) -> list[PathState]:
        with self.lock:
            return self.board.snapshot()

    # --- the end ---

    def unused(self, since: float) -> bool:
        """Returns whether nothing runs or waits, and no chain came after ``since``."""
        with self.lock:
            return not self.running and not self._waiting and self.last_used <= since

    def close(self) -> None:
        """Closes the peer, and stops what waits and what runs."""
        with self.lock:
            self._closed = True
            self._shut_short_ways()
            left = [*self.running, *self.waiting()]
            self._waiting.clear()
        for chain in left:
            chain.stop(SHUTDOWN)


def _moved(chain: Chain, outcome: ChainOutcome) -> int:
    if outcome.refusals is None:
        return chain.nbytes
    return sum(part.length for part, code in zip(chain.slices, outcome.refusals, strict=True) if not code)
