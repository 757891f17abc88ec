"""The clusters of instances that are served from here: the region's own, and those whose load balancers have failed.

Each cluster has a conductor, which lists its instances and places requests on them. An adopted cluster is given back
when the regional controller says so; requests that run there run to their end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.federation.view import Cluster as Told
from pinyon.frontdoor.clusters import Adopted
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.target import Report
from pinyon.runtime.channel import Channels

OnListed = Callable[[Collection[str], Collection[str]], None]
"""A callback for what :meth:`ConductorCluster.update` returns."""
HOME = ""
"""The name of the region's own cluster."""


class Clusters(Adopted[ConductorCluster]):
    """The clusters: ``start`` → ``adopt`` at each change → ``close``. ``make`` makes one whose session is not started
    yet, of its name, its conductor's address, and a callback for the news of each list."""

    def __init__(
        self,
        models: ServedModels,
        unread_tokens: int,
        channels: Channels,
        home_address: str,
        make: Callable[[str, str, OnListed], ConductorCluster],
        clock: Clock,
    ) -> None:
        super().__init__(models)
        self.changed: Callable[[], None] = lambda: None
        """A callback for new lists of instances."""
        self.workers = WorkerSessions(unread_tokens, self.load, self.lost, clock, channels)
        self._make = make
        self._clock = clock
        self.home = make(HOME, home_address, self.update_sessions)

    def __iter__(self) -> Iterator[ConductorCluster]:
        return iter([self.home, *self.adopted.values()])

    def get(self, name: str) -> ConductorCluster:
        """Returns the cluster of that name, or the region's own if there is none (any more)."""
        return self.adopted.get(name, self.home)

    def start(self) -> None:
        self.home.conductor.start()

    async def close(self) -> None:
        await self.workers.close()
        await self.give_all_back()
        await self.home.conductor.close()

    def own(self, clusters: Sequence[Told]) -> None:
        for told in clusters:
            self.home.removed = frozenset(told.removed)

    # -- clusters of other regions (pinyon.frontdoor.clusters.Adopted)

    def serves(self, told: Told) -> bool:
        return bool(told.conductor)

    def is_same(self, cluster: ConductorCluster, told: Told) -> bool:
        return told.conductor == cluster.conductor.address

    def begin(self, name: str, told: Told) -> ConductorCluster:
        cluster = self._make(name, told.conductor, self.update_sessions)
        cluster.conductor.start()
        return cluster

    def told(self, cluster: ConductorCluster, told: Told) -> None:
        cluster.removed = frozenset(told.removed)

    def end(self, cluster: ConductorCluster) -> Coroutine[Any, Any, None]:
        self.update_sessions()
        return cluster.conductor.close()

    # -- instances

    def update_sessions(self, renewed: Collection[str] = (), restarted: Collection[str] = ()) -> None:
        """Updates the sessions to instances after a new list, or when a cluster is given back. All instances report
        their load, if requests may have to wait for room, or if the region has a name."""
        known: dict[str, str] = {}
        for served in list(self.models.by_name.values()):
            mine = next((each for each in self if each.model(served.name) is not None), None)
            if mine is not None:  # while nobody serves it, it stays what it was
                self.models.set_by_servers(served, served.name in mine.by_servers)
            elif not served.by_servers:
                self.models.drop_unserved(served.name)
        self.changed()
        for each in self:
            known.update(each.known(self.models.by_name.keys()))
            if not self._watches:
                each.answer_all()
        self.workers.keep(known, watch=self._watches, renewed=renewed, restarted=restarted)
        self.models.tell()

    @property
    def _watches(self) -> bool:
        return self.models.selective or bool(self.models.region)

    def load(self, address: str, load: worker_pb2.Load, unseen: int) -> None:
        """Records an instance's own report. A draining one takes nothing new, as if a request waited there."""
        report = Report(max(load.pending, load.draining), load.running, load.room)
        for cluster in self:
            cluster.heard(address, report, self._clock(), unseen)
        self.models.tell()

    def lost(self, address: str) -> None:
        """Records that the session of an instance has ended. One that is not watched stays a choice: only a request
        would open the next session to it."""
        for cluster in self:
            cluster.lost(address, self._clock(), live=not self._watches)
        self.models.tell()
