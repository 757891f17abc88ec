"""All peers of an engine: who gets which chain, and their upkeep by probes, link events and the end of idle ones."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from math import inf

from pinyon.transfer.chains.chain import SHUTDOWN, Chain
from pinyon.transfer.host.interfaces import LinkMonitor
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.endpoint import Endpoint
from pinyon.transfer.paths.board import PathState
from pinyon.transfer.paths.peer import Peer
from pinyon.transfer.paths.reach import Reach
from pinyon.transfer.paths.workers import Workers
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.segment import PeerId, SegmentDescriptor

_log = logging.getLogger(__name__)
_TEND_S = 0.1
_MAINTAIN_S = 1.0
_CLOSE_S = 10.0
_MAX_PROBES = 8
"""Probes at a time."""


class Peers:
    """The owner of the peers, the transports and the thread that tends them."""

    def __init__(
        self,
        context: EngineContext,
        reach: Reach,
        transports: Mapping[str, Transport],
        tend: Callable[[float], object],
        rng: random.Random,
    ) -> None:
        """Calls ``tend`` with the time about once a second, from ``start`` on."""
        self._context = context
        self._reach = reach
        self.transports = transports
        self._tend_too = tend
        self._rng = rng
        self._lock = threading.Lock()
        self.by_name: dict[PeerId, Peer] = {}
        """The peers that are known, changed with the lock held and read without."""
        self.moving: dict[Endpoint, Path] = {}
        """Endpoints in use by callers that move a small request themselves (``SmallTransfers``), kept without a lock.

        A caller enters its endpoint and then checks that its way is open; code that shuts the way then looks here."""
        self._closed = False
        self._closing = threading.Event()
        self._probing = 0
        self._down: set[str] = set()
        self._workers = Workers()
        self._tender = threading.Thread(target=self._tend, name="pinyon-transfer-tend", daemon=True)
        self._monitor = LinkMonitor(nic.name for nic in reach.nics if nic.transport == "tcp")

    def start(self) -> None:
        self._tender.start()

    # --- chains ---

    def submit(self, chain: Chain) -> None:
        """Starts a chain without blocking; another thread finishes it later."""
        self._give(chain, inline=False)

    def run(self, chain: Chain) -> None:
        """Starts a chain, in the calling thread if a path has room now; it need not be finished on return."""
        self._give(chain, inline=True)

    def _give(self, chain: Chain, *, inline: bool) -> None:
        peer = self.by_name.get(chain.remote.peer) or self.peer(chain.remote)
        if peer is None:
            chain.finish(SHUTDOWN)
            return
        peer.learn(chain.remote)
        path = peer.submit(chain, inline=inline)
        if self.by_name.get(chain.remote.peer) is not peer:  # it was forgotten just before
            with self._lock:
                if not self._closed:
                    self.by_name.setdefault(chain.remote.peer, peer)
        if path is not None:
            peer.run(chain, path)

    def peer(self, remote: SegmentDescriptor) -> Peer | None:
        """Returns the peer of this descriptor, which is known from now on; None if closed."""
        with self._lock:
            if self._closed:
                return None
            peer = self.by_name.get(remote.peer)
            if peer is None:
                if len(self.by_name) >= self._context.limits.max_peers:
                    self._forget_one()
                peer = self.by_name[remote.peer] = Peer(
                    self._context, remote, self._reach, self.transports, self._workers, self._rng
                )
                for name in self._down:
                    peer.nic_down(name)
        return peer

    def _forget_one(self) -> None:
        """Forgets the peer used longest ago, but none with chains on the way: those have their own bound. Lock held."""
        for name, peer in sorted(self.by_name.items(), key=lambda one: one[1].last_used):
            if peer.unused(inf):
                del self.by_name[name]
                return

    @property
    def endpoints(self) -> int:
        """Number of connections and queue pairs open towards peers."""
        return sum(transport.endpoints for transport in self.transports.values())

    def path_states(self) -> list[tuple[PeerId, PathState]]:
        """Returns the state of every path to every peer."""
        return [(name, state) for name, peer in self.known() for state in peer.snapshot()]

    # --- upkeep ---

    def known(self) -> list[tuple[PeerId, Peer]]:
        with self._lock:
            return list(self.by_name.items())

    def link_changed(self, name: str, up: bool) -> None:
        _log.info("NIC %s is %s", name, "up" if up else "down")
        with self._lock:
            (self._down.discard if up else self._down.add)(name)
        for _, peer in self.known():
            (peer.nic_up if up else peer.nic_down)(name)
        if not up:
            self._interrupt(lambda path: path.local_nic == name)

    def _interrupt(self, concerned: Callable[[Path], bool]) -> None:
        """Stops callers that move a small request over one of these paths, whose short ways are shut."""
        for endpoint, path in list(self.moving.items()):
            if concerned(path):
                endpoint.abort()

    def _tend(self) -> None:
        next_maintenance = self._context.clock() + _MAINTAIN_S
        while not self._closing.wait(_TEND_S):
            now = self._context.clock()
            try:
                for name, up in self._monitor.changes():
                    self.link_changed(name, up)
                self.start_probes(now)
                if now >= next_maintenance:
                    next_maintenance = now + _MAINTAIN_S
                    self.drop_idle(now)
                    self._tend_too(now)
                    for transport in self.transports.values():
                        transport.maintain(now)
            except Exception:
                _log.exception("maintenance of the transfer paths failed")

    def drop_idle(self, now: float) -> None:
        """Ends chains that wait beyond their deadline, and forgets peers that are not used any more.

        A chain that comes for such a peer just now runs to its end all the same."""
        for name, peer in self.known():
            peer.expire(now)
            if peer.unused(now - self._context.limits.idle_s):
                with self._lock:
                    if self.by_name.get(name) is peer:
                        del self.by_name[name]

    def start_probes(self, now: float) -> None:
        """Starts the probes that are due, as far as there are threads for them."""
        for _, peer in self.known():
            for path in peer.due_probes(now, _MAX_PROBES - self._probing):
                with self._lock:
                    self._probing += 1
                if not self._workers.start(self._probe, peer, path):
                    self._probe(peer, path)

    def _probe(self, peer: Peer, path: Path) -> None:
        try:
            peer.probe(path, self._context.clock() + self._context.limits.connect_s)
        finally:
            with self._lock:
                self._probing -= 1

    def close(self) -> None:
        """Stops all chains and frees everything."""
        with self._lock:
            self._closed = True
            peers = list(self.by_name.values())
            self.by_name.clear()
        self._closing.set()
        for peer in peers:
            peer.close()
        self._interrupt(lambda path: True)
        for transport in self.transports.values():
            transport.close()
        deadline = self._context.clock() + _CLOSE_S
        if self._tender.is_alive():  # first, because it starts the probes
            self._tender.join(_CLOSE_S)
        self._monitor.close()
        for thread in self._workers.close():
            thread.join(max(0.0, deadline - self._context.clock()))
