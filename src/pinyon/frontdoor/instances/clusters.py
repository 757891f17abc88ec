"""Instances that are served from here: the region's own, and those of regions whose load balancers have failed.

Each cluster has a conductor, which lists its instances and places on them. An adopted one is let go when the regional
controller says so; what runs there then runs on to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.federation.view import Cluster as Told
from pinyon.frontdoor.instances.conductor_session import ConductorSession
from pinyon.frontdoor.instances.instances import InstanceView
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.target import Report
from pinyon.runtime.logging import get_logger

__all__ = ["HOME", "Cluster", "Clusters"]

HOME = ""
"""The name of the region's own cluster."""
ADOPTED_MAX = 64

_log = get_logger("lb.clusters")


class Cluster:
    """``conductor`` and the ``view`` of its instances. Those ``removed`` get nothing new."""

    def __init__(self, name: str, region: str, address: str, view: InstanceView) -> None:
        self.name, self.region, self.address = name, region, address
        self.view = view
        self.conductor: ConductorSession
        self.removed: frozenset[str] = frozenset()


class Clusters:
    """``start`` → ``adopt`` whenever that changes → ``close``. ``make_conductor`` gives a session to one, not started,
    for an address and what is told each list of instances."""

    def __init__(
        self,
        models: ServedModels,
        workers: WorkerSessions,
        home_address: str,
        make_conductor: Callable[[str, Callable[[conductor_pb2.InstanceList, bool], None]], ConductorSession],
        make_view: Callable[[str], InstanceView],
        clock: Clock,
    ) -> None:
        self._models = models
        self._workers = workers
        self._make_conductor = make_conductor
        self._make_view = make_view
        self._clock = clock
        self._by_name: dict[str, Cluster] = {}
        self._let_go: set[asyncio.Task[None]] = set()
        self.home = self._add(HOME, models.region, home_address)

    def _add(self, name: str, region: str, address: str) -> Cluster:
        cluster = Cluster(name, region, address, self._make_view(name))

        def on_instances(message: conductor_pb2.InstanceList, first: bool) -> None:
            cluster.view.update(message, self._clock(), first)
            self._told(cluster)

        cluster.conductor = self._make_conductor(address, on_instances)
        self._by_name[name] = cluster
        return cluster

    def __iter__(self) -> Iterator[Cluster]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> Cluster:
        """The own one if there is none of that name (any more)."""
        return self._by_name.get(name, self.home)

    @property
    def adopted(self) -> Collection[str]:
        return self._by_name.keys() - {HOME}

    def start(self) -> None:
        self.home.conductor.start()

    async def close(self) -> None:
        for name in [*self.adopted]:
            self._drop(name)
        await self.home.conductor.close()
        await asyncio.gather(*self._let_go)

    def own(self, clusters: Sequence[Told]) -> None:
        """What the controller says of the region's own."""
        for told in clusters:
            self.home.removed = frozenset(told.removed)

    def adopt(self, wanted: Mapping[str, Told]) -> None:
        """From now on serve these for others: those that have a conductor."""
        wanted = {name: told for name, told in wanted.items() if told.conductor}
        for name in [*self.adopted]:
            known = self._by_name[name]
            if name not in wanted or (wanted[name].region, wanted[name].conductor) != (known.region, known.address):
                self._drop(name)
        for name, told in list(wanted.items())[:ADOPTED_MAX]:
            if name not in self._by_name:
                _log.warning("serving %s for its load balancers, which have failed", name)
                self._models.adopt(name, told.region)
                self._add(name, told.region, told.conductor).conductor.start()
            self._by_name[name].removed = frozenset(told.removed)

    def _drop(self, name: str) -> None:
        _log.warning("%s is served by its own load balancer again", name)
        cluster = self._by_name.pop(name)
        self._models.give_back(name)
        task = asyncio.create_task(cluster.conductor.close(), name=f"let go of {name}")
        self._let_go.add(task)
        task.add_done_callback(self._let_go.discard)
        self._told(cluster)

    # -- instances

    def _told(self, cluster: Cluster) -> None:
        """A list has come, or one is of no interest any more."""
        addresses = frozenset().union(*(each.view.addresses for each in self))
        view = cluster.view
        self._workers.keep_only(addresses, view.renewed, view.restarted)
        self.watch()
        self._models.tell()

    def watch(self) -> None:
        """Hear of the load of all instances, where requests wait for room."""
        if self._models.selective or self._models.region:
            watched: dict[str, str] = {}
            for each in self:
                watched.update(each.view.watched(self._models.by_name.keys()))
            self._workers.watch(watched)

    def load(self, address: str, instance_id: str, load: worker_pb2.Load, unseen: int) -> None:
        """An instance's own word. Who drains takes nothing new: as if somebody waited there."""
        report = Report(max(load.pending, load.draining), load.running, load.room)
        for cluster in self:
            if (known := cluster.view.at(address)) is not None:
                self._models.load(cluster.name, *known, report, unseen)

    def silent(self, address: str, instance_id: str) -> None:
        """Its session has ended."""
        for cluster in self:
            if (known := cluster.view.at(address)) is not None:
                self._models.silent(cluster.name, *known)

    async def wait_change(self, timeout_s: float) -> None:
        """Until the own cluster's next list, or for ``timeout_s``."""
        await self.home.view.wait_change(timeout_s)
