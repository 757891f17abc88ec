"""The chains to one peer: which path each takes, what runs on it, what waits.

A chain is given to a path only when the path has room for it. The rest waits in one queue, which so feeds whichever
path is fast: slices spread over NICs by measured speed, and a slow or dying NIC holds few of them (Mooncake §3.2.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pinyon.transfer.chains.chain import Chain, Outcome
from pinyon.transfer.paths.board import PathBoard
from pinyon.transfer.paths.lane import Lane
from pinyon.transfer.paths.reach import NIXL, PeerPaths, roads
from pinyon.transfer.paths.short_way import ShortWay
from pinyon.transfer.types.path import Path, Tiers
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus

NO_THREAD = Outcome(TransferStatus.FAILED, Reason.INTERNAL)
_NO_PATH = Outcome(TransferStatus.FAILED, Reason.NO_PATH)
_JUST_NOW_S = 1.0
"""A path that failed less than this ago is not tried as a last resort."""
_MAX_LOCATION_PAIRS = 256


class PeerQueue:
    """The peer serialises the calls. Methods that return *hopeless* chains leave it to the caller to end those, without
    the lock, as ``chain.failure or last_failure`` says."""

    def __init__(
        self,
        paths: PeerPaths,
        board: PathBoard,
        new_lane: Callable[[Path, Tiers], Lane],
        short_way: Callable[[Path], ShortWay | None],
    ) -> None:
        """``short_way``: makes one of a path, if its transport has any."""
        self.paths = paths
        self.board = board
        self.running: dict[Chain, Path] = {}
        """Given to a path, whether a thread has taken them or not."""
        self.lanes: dict[Path, Lane] = {}
        self.last_failure = _NO_PATH
        self._new_lane = new_lane
        self._short_way = short_way
        self._waiting: dict[tuple[str, str, bool], deque[Chain]] = {}
        """By memory locations and whether NIXL was the better road, none empty: what waits for a busy NIC, or for the
        one connection of NIXL, does not hold up what wants another one."""
        self._short: dict[tuple[str, str, bool], ShortWay] = {}
        """By memory locations, and whether it is for what goes by NIXL; while nothing is wrong with it."""
        self._failed_at: dict[Path, float] = {}

    # --- books ---

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting

    def waiting(self) -> list[Chain]:
        return [chain for queue in self._waiting.values() for chain in queue]

    def tiers(self, chain: Chain) -> Tiers:
        """The paths that the chain may take, best first."""
        regions = (part.remote_region for part in chain.slices)
        where = chain.local_location, chain.remote_location
        tiers = self.paths.tiers(*where, regions)  # first: then it is known whether NIXL is one of them
        if not self.paths.has_nixl:
            return tiers
        return roads(tiers, by_nixl=self._by_nixl(*where, chain.opcode, chain.nbytes))

    def _by_nixl(self, local_location: str, remote_location: str, opcode: Opcode, nbytes: int) -> bool:
        """Is it the better road, and not avoided?"""
        return self.paths.by_nixl(local_location, remote_location, opcode, nbytes) and self.board.usable(NIXL)

    def carries(self, tiers: Tiers) -> bool:
        """Does anything run on one of these paths?"""
        carrying = set(self.running.values())
        return any(path in carrying for tier in tiers for path in tier)

    # --- giving chains to paths ---

    def submit(self, chain: Chain, now: float, *, inline: bool) -> Path | Outcome | None:
        """Give a fresh chain to a path, or let it wait. A path: the caller must run the chain there (only ``inline``).
        An outcome: there is no way."""
        tiers = self.tiers(chain)
        # A fresh chain tries an avoided path too when there is no other: the peer may be back.
        path = self.board.choose(tiers, chain.nbytes) or self.board.choose_any(tiers, chain.nbytes, now)
        if path is None:
            return _NO_PATH
        lane = self._lane(path, tiers)
        if lane.room <= 0:
            self._wait(chain)
            return None
        if inline:
            self._assign(chain, path, lane, tiers)
            return path
        return None if self._hand_over(chain, path, lane, tiers) else NO_THREAD

    def pump(self, now: float) -> list[Chain]:
        """Give waiting chains to paths with room. Returns those that no path is left for."""
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
            path = self._choose(chain, tiers) or self._last_resort(chain, tiers, now)
            if path is None:
                if self.carries(tiers):  # what runs may bring an avoided path back, or fail too
                    continue
                hopeless.append(queue.popleft())
            else:
                lane = self._lane(path, tiers)
                if lane.room <= 0:
                    continue
                queue.popleft()
                if not self._hand_over(chain, path, lane, tiers):
                    chain.failure = NO_THREAD
                    hopeless.append(chain)
                self._waiting[where] = self._waiting.pop(where)  # next time others are first
            turns.append(where)
        return hopeless

    def _choose(self, chain: Chain, tiers: Tiers) -> Path | None:
        """A usable path, of a transport that was not full for this chain if there is one."""
        if chain.full:
            others = tuple(tier for tier in tiers if tier[0].transport not in chain.full)
            path = self.board.choose(others, chain.nbytes)
            if path is not None:
                return path
        return self.board.choose(tiers, chain.nbytes)

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

    def _lane(self, path: Path, tiers: Tiers) -> Lane:
        lane = self.lanes.get(path)
        if lane is None:
            lane = self.lanes[path] = self._new_lane(path, tiers)
        return lane

    def _wait(self, chain: Chain, *, first: bool = False) -> None:
        here, there = chain.local_location, chain.remote_location
        by_nixl = self.paths.has_nixl and self._by_nixl(here, there, chain.opcode, chain.nbytes)
        queue = self._waiting.setdefault((here, there, by_nixl), deque())
        if first:
            queue.appendleft(chain)
        else:
            queue.append(chain)

    def _assign(self, chain: Chain, path: Path, lane: Lane, tiers: Tiers) -> None:
        lane.room -= 1
        # What has come back to a full transport waits there: nothing else was usable.
        full = {path.transport, *chain.full}
        chain.elsewhere = path.transport not in chain.full and any(tier[0].transport not in full for tier in tiers)
        chain.remote = self.paths.remote  # whose NICs the path names
        self.running[chain] = path
        self.board.started(path, chain.nbytes)

    def _unassign(self, chain: Chain, path: Path) -> None:
        self.lanes[path].room += 1
        del self.running[chain]

    def _hand_over(self, chain: Chain, path: Path, lane: Lane, tiers: Tiers) -> bool:
        """To the lane's threads. False: there is none and none can be had."""
        self._assign(chain, path, lane, tiers)
        if lane.give(chain):
            return True
        self._withdraw(chain, path)
        return False

    # --- what became of them ---

    def completed(self, chain: Chain, path: Path, ran_s: float, now: float) -> list[Chain]:
        self._unassign(chain, path)
        self.board.completed(path, chain.nbytes, ran_s, now)
        self._learn_short(chain, path)
        return self.pump(now) if self._waiting else []

    def _learn_short(self, chain: Chain, path: Path) -> None:
        where = (chain.local_location, chain.remote_location, path.transport == "nixl")
        if where in self._short or not self.board.usable(path):
            return
        if self.tiers(chain)[:1] == ((path,),) and (way := self._short_way(path)) is not None:
            if len(self._short) >= _MAX_LOCATION_PAIRS:
                self.shut_short_ways()
            self._short[where] = way

    # --- the short way ---

    def short_way(self, local_location: str, remote_location: str, opcode: Opcode, nbytes: int) -> ShortWay | None:
        """For one small request. Needs no lock: who uses it looks at ``open`` when others can see that he does."""
        if self.paths.beyond:
            return None
        by_nixl = self.paths.has_nixl and self._by_nixl(local_location, remote_location, opcode, nbytes)
        return self._short.get((local_location, remote_location, by_nixl))

    def adopt(self, chain: Chain, path: Path) -> None:
        """The chain counts as running there: what it moves was tried the short way."""
        tiers = self.tiers(chain)
        self._assign(chain, path, self._lane(path, tiers), tiers)

    def shut_short_ways(self) -> None:
        """They may be wrong now."""
        for way in self._short.values():
            way.open = False
        self._short.clear()

    def aborted(self, chain: Chain, path: Path, now: float) -> list[Chain]:
        """It was stopped, or failed for a reason that is not the path's."""
        self._withdraw(chain, path)
        return self.pump(now) if self._waiting else []

    def full(self, chain: Chain, path: Path) -> None:
        """The path's transport had no endpoint for it in good time: it is to wait for another one."""
        chain.full |= {path.transport}
        self._withdraw(chain, path)

    def reroute(self, chain: Chain, path: Path, refusals: bytes) -> None:
        """The path's transport cannot reach the refused slices' memory: the chain waits for another one."""
        chain.failure = _NO_PATH
        self._withdraw(chain, path)
        for part, code in zip(chain.slices, refusals, strict=True):
            if code == Reason.OTHER_TRANSPORT:
                self.paths.exclude(part.remote_region, path.transport)

    def _withdraw(self, chain: Chain, path: Path) -> None:
        self._unassign(chain, path)
        self.board.aborted(path, chain.nbytes)

    def failed(self, chain: Chain, path: Path, outcome: Outcome, ran_s: float, now: float) -> None:
        """The path failed under it, and is avoided from now on."""
        self._unassign(chain, path)
        self.shut_short_ways()
        chain.tried |= {path}
        self.board.failed(path, chain.nbytes, ran_s, now)
        self._failed_at[path] = now
        self.last_failure = outcome

    def again(self, chain: Chain) -> None:
        """It waits for another attempt, before those that had none."""
        self._wait(chain, first=True)

    def recall(self, path: Path) -> None:
        """What the path's threads have not taken yet can go another way."""
        lane = self.lanes.get(path)
        while lane is not None and lane.chains:
            chain = lane.chains.pop()
            self._withdraw(chain, path)
            self.again(chain)

    def clear(self) -> list[Chain]:
        """Nothing waits any more. Returns what did, and what runs."""
        for path in self.lanes:
            self.recall(path)
        left = [*self.running, *self.waiting()]
        self._waiting.clear()
        self.shut_short_ways()
        return left

    # --- health ---

    def nic_down(self, name: str) -> None:
        self.shut_short_ways()
        self.board.nic_down(name)
        for path in self.lanes:
            if path.local_nic == name:
                self.recall(path)
        for chain, path in self.running.items():
            if path.local_nic == name:
                chain.interrupt()  # under the lock: not when it has gone over to a sound path meanwhile

    def nic_up(self, name: str, now: float) -> None:
        self.board.nic_up(name, now)
        for path in [path for path in self._failed_at if path.local_nic == name]:
            del self._failed_at[path]
        for chain in [*self.running, *self.waiting()]:
            chain.tried = frozenset(path for path in chain.tried if path.local_nic != name)
