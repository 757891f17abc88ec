"""Gives each chain to the routes of its peer, and looks after them: probes, link events, idle ones."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from pinyon.transfer.chain import SHUTDOWN, Chain
from pinyon.transfer.host.link_monitor import LinkMonitor
from pinyon.transfer.host.nic import Nic
from pinyon.transfer.host.topology import Topology
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.memory.staging_pool import StagingPool
from pinyon.transfer.path import Path, Tiers
from pinyon.transfer.paths.board import PathState
from pinyon.transfer.paths.peer import Retired, Routes
from pinyon.transfer.paths.reach import End, candidate_paths
from pinyon.transfer.request import Reason
from pinyon.transfer.segment import PeerId, SegmentDescriptor
from pinyon.transfer.stats import Meter
from pinyon.transfer.transports.base import Transport

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)
_TEND_S = 0.1
_MAINTAIN_S = 1.0
_CLOSE_S = 10.0
_MAX_PROBES = 8
"""Probes at a time, a thread each."""


class Dispatcher:
    """Owns the routes, the transports and the thread that tends them."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        order: Sequence[str],
        nics: Sequence[Nic],
        topology: Topology | None,
        boot_id: bytes,
        host_id: str,
        limits: TransferLimits,
        meter: Meter,
        staging: StagingPool,
        rng: random.Random,
    ) -> None:
        """``order``: the transports that may be used, best first."""
        self.transports = transports
        self.limits = limits
        self.rng = rng
        self.staging = staging
        self._order = tuple(order)
        self._nics = tuple(nics)
        self._topology = topology
        self._boot_id = boot_id
        self._host_id = host_id
        self._meter = meter
        self._lock = threading.Lock()
        self._routes: dict[PeerId, Routes] = {}
        self._closed = False
        self._closing = threading.Event()
        self._probes: set[threading.Thread] = set()
        self._down: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._monitor = LinkMonitor(
            [nic.name for nic in nics if nic.name and nic.transport == "tcp"], self._link_changed
        )

    def start(self) -> None:
        tender = threading.Thread(target=self._tend, name="pinyon-transfer-tend", daemon=True)
        tender.start()
        self._threads.append(tender)
        self._monitor.start()

    # --- chains ---

    def submit(self, chain: Chain) -> None:
        """Start a chain; it is finished later, from another thread. Does not block."""
        self._give(chain, inline=False)

    def run(self, chain: Chain) -> None:
        """Start a chain, in the calling thread if a path has room now; it need not be finished on return."""
        self._give(chain, inline=True)

    def _give(self, chain: Chain, *, inline: bool) -> None:
        peer = chain.remote.peer
        while True:
            routes = self._routes.get(peer) or self._new_routes(chain.remote)
            if routes is None:
                chain.finish(SHUTDOWN)
                return
            routes.learn(chain.remote)
            try:
                path = routes.submit(chain, inline=inline)
            except Retired:
                self._forget(peer, routes)
                continue
            if path is not None:
                routes.run(chain, path)
            return

    def _new_routes(self, remote: SegmentDescriptor) -> Routes | None:
        with self._lock:
            if self._closed:
                return None
            routes = self._routes.get(remote.peer)
            if routes is None:
                if len(self._routes) >= self.limits.max_peers:
                    self._forget_one()
                routes = self._routes[remote.peer] = Routes(self, remote)
                for name in self._down:
                    routes.nic_down(name)
        return routes

    def _forget_one(self) -> None:
        """Lock held. The peer used longest ago, but none that chains are on their way to; their number has its own
        bound."""
        for peer in sorted(self._routes, key=lambda peer: self._routes[peer].last_used):
            if self._routes[peer].retire(inf):
                del self._routes[peer]
                return

    def _forget(self, peer: PeerId, routes: Routes) -> None:
        with self._lock:
            if self._routes.get(peer) is routes:
                del self._routes[peer]

    def candidates(self, remote: SegmentDescriptor, local_location: str, remote_location: str) -> Tiers:
        """The paths between these memories, best first."""
        own = remote.boot_id == self._boot_id
        return candidate_paths(
            End(self._nics, self._topology, local_location),
            End(remote.nics, remote.topology, remote_location),
            self._order,
            same_process=own,
            shm=self._same_host(remote) and not own,
        )

    def streams(self, remote: SegmentDescriptor) -> int:
        """How many NICs chains to this peer are spread over."""
        if remote.boot_id == self._boot_id or ("shm" in self._order and self._same_host(remote)):
            return 1
        for transport in self._order:
            here = sum(1 for nic in self._nics if nic.transport == transport)
            there = sum(1 for nic in remote.nics if nic.transport == transport)
            if here and there:
                return max(here, there)
        return 1

    def _same_host(self, remote: SegmentDescriptor) -> bool:
        return bool(remote.shm) and remote.host_id == self._host_id

    @property
    def endpoints(self) -> int:
        """Connections and queue pairs open towards peers."""
        return sum(transport.endpoints for transport in self.transports.values())

    def room(self, path: Path, alike: int) -> int:
        """How many chains may run at a time on a path that has ``alike`` paths (itself included) in its tier."""
        if path.transport == "tcp":
            return max(min(2, self.limits.connections_per_peer), self.limits.connections_per_peer // alike)
        return self.limits.queue_pairs_per_path if path.transport == "rdma" else 2

    # --- counters ---

    def record(self, path: Path, nbytes: int, elapsed_s: float) -> None:
        with self._meter.lock:
            self._meter.path_completed(path, nbytes, elapsed_s)

    def record_failure(self, path: Path, reason: Reason, *, retried: bool) -> None:
        with self._meter.lock:
            self._meter.path_failed(path, reason, retried)

    def path_states(self) -> list[tuple[PeerId, PathState]]:
        """What is known of every path to every peer."""
        return [(peer, state) for peer, routes in self._all() for state in routes.snapshot()]

    # --- looking after them ---

    def _all(self) -> list[tuple[PeerId, Routes]]:
        with self._lock:
            return list(self._routes.items())

    def _link_changed(self, name: str, up: bool) -> None:
        _log.info("NIC %s is %s", name, "up" if up else "down")
        with self._lock:
            (self._down.discard if up else self._down.add)(name)
        for _, routes in self._all():
            if up:
                routes.nic_up(name)
            else:
                routes.nic_down(name)

    def _tend(self) -> None:
        next_maintenance = time.monotonic() + _MAINTAIN_S
        while not self._closing.wait(_TEND_S):
            now = time.monotonic()
            try:
                self._start_probes(now)
                if now >= next_maintenance:
                    next_maintenance = now + _MAINTAIN_S
                    self._drop_idle(now)
                    for transport in self.transports.values():
                        transport.maintain(now)
            except Exception:
                _log.exception("maintenance of the transfer paths failed")

    def _drop_idle(self, now: float) -> None:
        for peer, routes in self._all():
            routes.expire(now)
            if routes.retire(now - self.limits.idle_s):
                self._forget(peer, routes)

    def _start_probes(self, now: float) -> None:
        for _, routes in self._all():
            for path in routes.due_probes(now, _MAX_PROBES - len(self._probes)):
                thread = threading.Thread(
                    target=self._probe, args=(routes, path), name="pinyon-transfer-probe", daemon=True
                )
                self._probes.add(thread)
                try:
                    thread.start()
                except RuntimeError:
                    self._probes.discard(thread)
                    self._probe(routes, path)

    def _probe(self, routes: Routes, path: Path) -> None:
        try:
            routes.probe(path, time.monotonic() + self.limits.connect_s)
        finally:
            self._probes.discard(threading.current_thread())

    def close(self) -> None:
        """Stop all chains, free everything."""
        with self._lock:
            self._closed = True
            routes = list(self._routes.values())
            self._routes.clear()
        self._closing.set()
        self._monitor.close()
        threads = [thread for one in routes for thread in one.close()]
        for transport in self.transports.values():
            transport.close()
        deadline = time.monotonic() + _CLOSE_S
        _join(self._threads, deadline)  # first: it starts the probes
        _join([*threads, *self._probes], deadline)


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
