"""One peer: gives its chains to paths, runs them, and sends those whose path failed another way."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Mapping

from pinyon.transfer.chains.chain import LATE, NO_ROOM, SHUTDOWN, Chain, Outcome
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.memory.buffers import HOST_PREFIX
from pinyon.transfer.paths.board import PathBoard, PathLimits, PathState
from pinyon.transfer.paths.lane import Lane
from pinyon.transfer.paths.queue import PeerQueue
from pinyon.transfer.paths.reach import PeerPaths, Reach
from pinyon.transfer.paths.short_way import ShortWay
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.transports.staged import needs_staging, run_staged
from pinyon.transfer.types.path import Path, Tiers
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

_log = logging.getLogger(__name__)
_DEFECT = Outcome(TransferStatus.FAILED, Reason.INTERNAL)
_SILENT_S = 0.25
"""A deadline that passes sooner after a chain's start says nothing of its path."""


class Retired(Exception):
    """Closed for want of use just before a chain came: it needs a new one."""


class Peer:
    """All methods are thread-safe."""

    def __init__(
        self,
        context: EngineContext,
        remote: SegmentDescriptor,
        reach: Reach,
        transports: Mapping[str, Transport],
        rng: random.Random,
    ) -> None:
        self._reach = reach
        self._limits = context.limits
        self._transports = transports
        self._meter = context.meter
        self._staging = context.memory.staging.outbound
        self._clock = context.clock
        self.queue = PeerQueue(
            PeerPaths(reach, remote), PathBoard(PathLimits(), rng), self._new_lane, self._new_short_way
        )
        self.lock = threading.Lock()
        """Of the queue and all that it holds."""
        self._closed = False
        self.last_used = self._clock()

    def _new_lane(self, path: Path, tiers: Tiers) -> Lane:
        alike = next((len(tier) for tier in tiers if path in tier), 1)
        return Lane(path, self._reach.room(path, alike, self.queue.paths.remote), self.lock, self.run)

    def _new_short_way(self, path: Path) -> ShortWay | None:
        transport = self._transports[path.transport]
        if not isinstance(transport, Endpoints) or not transport.moves_bytes:
            return None
        return ShortWay((self.queue.paths.remote.peer, path), transport)

    # --- one request, by its caller ---

    def short_way(
        self, remote: SegmentDescriptor, local_location: str, remote_location: str, opcode: Opcode, nbytes: int
    ) -> ShortWay | None:
        """None: there is none now, or ``remote`` has news of which paths there are."""
        paths = self.queue.paths
        if remote is not paths.remote and paths.is_news(remote):
            return None
        return self.queue.short_way(local_location, remote_location, opcode, nbytes)

    def adopt(self, chain: Chain, way: ShortWay, outcome: Outcome, started: float) -> bool:
        """A chain for a request that ended so on the short way: goes on as if it had run there. False: this peer is
        closed, nothing was done."""
        with self.lock:
            if self._closed:
                return False
            self.queue.adopt(chain, way.path)
        self._ran(chain, way.path, outcome, started)
        return True

    # --- chains ---

    def learn(self, remote: SegmentDescriptor) -> None:
        """Use what ``remote`` says about the peer's addresses, if it says anything else than what we had."""
        paths = self.queue.paths
        if remote is not paths.remote and paths.is_news(remote):
            with self.lock:
                paths.learn(remote)
                self.queue.shut_short_ways()

    def submit(self, chain: Chain, *, inline: bool = False) -> Path | None:
        """Give the chain to a path, or queue it. ``inline``: if a path has room now, the caller must :meth:`run` the
        chain there (returned). Raises Retired: nothing was done with the chain."""
        now = self._clock()
        with self.lock:
            if self._closed:
                raise Retired
            self.last_used = now
            given = self.queue.submit(chain, now, inline=inline)
        if isinstance(given, Outcome):
            chain.stop(given)
            return None
        return given

    def run(self, chain: Chain, path: Path) -> None:
        """Run a chain that was given to this path, in the calling thread. After it the chain is done or on its way over
        another path."""
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

    def _ran(self, chain: Chain, path: Path, outcome: Outcome, started: float) -> None:
        if outcome is _DEFECT:
            chain.interrupt()  # its endpoint, if it still has one, must not go on
        now = self._clock()
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
        if outcome is NO_ROOM and chain.elsewhere and now < chain.deadline and not chain.stopped:
            self._reroute(chain, path, None, now)
            return
        with self.lock:
            if completed:
                hopeless = self.queue.completed(chain, path, now - started, now)
            else:
                hopeless = self.queue.aborted(chain, path, now)
        if completed:
            with self._meter.lock:
                self._meter.path_completed(path, _moved(chain, outcome), now - started)
        chain.finish(outcome)
        self._end(hopeless)

    def _no_progress(self, chain: Chain, outcome: Outcome, elapsed_s: float) -> bool:
        """The deadline was sooner than the stall limit, but late enough for a path that works: else a caller with short
        deadlines would lose a share of its requests to a dead path for ever."""
        if outcome is NO_ROOM:
            return False
        late = outcome.reason is Reason.DEADLINE or chain.expired
        return late and elapsed_s > _SILENT_S and chain.nbytes < elapsed_s * self._limits.min_rate_bytes_s

    def _reroute(self, chain: Chain, path: Path, refusals: bytes | None, now: float) -> None:
        """This transport cannot reach the memory: another one must. What was moved is moved again. Without
        ``refusals`` it has no endpoint for the chain: another one may."""
        with self.lock:
            if refusals is None:
                self.queue.full(chain, path)
            else:
                self.queue.reroute(chain, path, refusals)
            retry = not self._closed
            if retry:
                self.queue.again(chain)
            hopeless = self.queue.pump(now)
        if not retry:
            chain.finish(SHUTDOWN)
        self._end(hopeless)

    def _path_failed(
        self, chain: Chain, path: Path, outcome: Outcome, started: float, now: float, *, final: bool
    ) -> None:
        try:
            self._transports[path.transport].forget(chain.remote, path)
        except Exception:
            _log.exception("closing a failed path's connections ended in a defect")
        chain.attempts += 1
        chain.failure = outcome
        retry = not final and now < chain.deadline and chain.attempts < self._limits.max_attempts
        with self.lock:
            retry = retry and not self._closed
            self.queue.failed(chain, path, outcome, now - started, now)
            if retry:
                self.queue.again(chain)
            self.queue.recall(path)
            hopeless = self.queue.pump(now)
        with self._meter.lock:
            self._meter.path_failed(path, outcome.reason, retry and chain not in hopeless)
        if not retry:
            chain.finish(outcome)
        self._end(hopeless)

    def _end(self, hopeless: list[Chain]) -> None:
        """Chains that no path is left for end as the last attempt did, their own or another's."""
        for chain in hopeless:
            chain.finish(chain.failure or self.queue.last_failure)

    # --- health ---

    def nic_down(self, name: str) -> None:
        """The link monitor says so: what runs over this NIC goes another way at once."""
        now = self._clock()
        with self.lock:
            self.queue.nic_down(name)
            hopeless = self.queue.pump(now)
        self._end(hopeless)

    def nic_up(self, name: str) -> None:
        """What failed over this NIC may be tried again, after a probe or as a last resort."""
        with self.lock:
            self.queue.nic_up(name, self._clock())

    def due_probes(self, now: float, most: int) -> list[Path]:
        """Avoided paths to be probed now, at most so many; each must then be given to :meth:`probe`."""
        with self.lock:
            due = self.queue.board.due_probes(now)[:most]
            for path in due:
                self.queue.board.probe_started(path, now)
            return due

    def probe(self, path: Path, deadline: float) -> None:
        """Try an avoided path with a connection of its own, so that no chain has to."""
        alive = False
        try:
            alive = self._transports[path.transport].probe(self.queue.paths.remote, path, deadline)
        except Exception:
            _log.exception("probing a transfer path ended in a defect")
        now = self._clock()
        with self.lock:
            if alive:
                self.queue.board.recovered(path)
            else:
                self.queue.board.probe_failed(path, now)
            hopeless = self.queue.pump(now)
        self._end(hopeless)

    def expire(self, now: float) -> None:
        """End chains that wait beyond their deadline."""
        with self.lock:
            late = [chain for chain in self.queue.waiting() if now > chain.deadline]
        for chain in late:
            chain.stop(LATE)

    def snapshot(self) -> list[PathState]:
        with self.lock:
            return self.queue.board.snapshot()

    # --- the end ---

    def retire(self, unused_since: float) -> bool:
        """Close, if nothing runs or waits and no chain came after that time. From then on ``submit`` raises."""
        with self.lock:
            if not self.queue.idle or self.last_used > unused_since:
                return False
            self.queue.shut_short_ways()
            self._close_lanes()
            return True

    def close(self) -> list[threading.Thread]:
        """Take nothing more, stop what waits and what runs; returns the threads to join."""
        with self.lock:
            left = self.queue.clear()
            threads = self._close_lanes()
        for chain in left:
            chain.stop(SHUTDOWN)
        return threads

    def _close_lanes(self) -> list[threading.Thread]:
        """Lock held."""
        self._closed = True
        for lane in self.queue.lanes.values():
            lane.close()
        return [thread for lane in self.queue.lanes.values() for thread in lane.threads]


def _moved(chain: Chain, outcome: Outcome) -> int:
    if outcome.refusals is None:
        return chain.nbytes
    return sum(part.length for part, code in zip(chain.slices, outcome.refusals, strict=True) if not code)
