"""The clusters of servers that are served from here: the region's own, and those whose load balancers have failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.federation.view import Cluster as Told
from pinyon.frontdoor.clusters import Adopted
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.fleet import ServerFleet
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.url import UpstreamUrl, parse_upstreams
from pinyon.frontdoor.upstreams.watch import Watch, WatchTimes
from pinyon.runtime.logging import get_logger

_log = get_logger("lb.clusters")


class UpstreamClusters(Adopted[Watch]):
    """The clusters: ``start`` → ``own`` and ``adopt`` at each change → ``close``. ``make`` makes a server from a URL. A
    cluster is the fleet of its servers, with the :class:`Watch` over them."""

    def __init__(
        self,
        urls: Sequence[UpstreamUrl],
        models: ServedModels,
        make: Callable[[UpstreamUrl], Server],
        times: WatchTimes,
        clock: Clock,
    ) -> None:
        """Takes the ``urls`` of this load balancer's own servers."""
        super().__init__(models)
        self.fleet = ServerFleet([make(url) for url in urls], models, clock)
        self._urls = urls
        self._make = make
        self._times = times
        self._clock = clock
        self._watch = Watch(self.fleet, times, clock)

    def start(self) -> None:
        self._watch.start()

    async def close(self) -> None:
        await self.give_all_back()
        await self._watch.close()
        self.fleet.close()

    def targets(self, cluster: str) -> ServerFleet:
        """Returns the fleet of an adopted cluster; the own one if the name is empty."""
        return self.adopted[cluster].fleet if cluster else self.fleet

    def servers(self) -> Collection[tuple[ServerFleet, Server]]:
        """Returns all servers with their fleets, each name once."""
        found: dict[str, tuple[ServerFleet, Server]] = {}
        for watch in (self._watch, *self.adopted.values()):
            for name, server in watch.fleet.servers.items():
                found.setdefault(name, (watch.fleet, server))
        return found.values()

    # -- what the controller says

    def own(self, clusters: Sequence[Told]) -> None:
        """Takes the servers that were added to the region's own, and those that were removed."""
        added = [url for each in clusters for url in _urls(each.added)]
        removed = {str(url) for each in clusters for url in _urls(each.removed)}
        self._use(self._watch, [*self._urls, *added], removed)

    def _use(self, watch: Watch, urls: Sequence[UpstreamUrl], removed: Collection[str] = ()) -> None:
        fleet, wanted = watch.fleet, dict.fromkeys(urls)
        if [str(url) for url in wanted] != list(fleet.servers):
            fleet.use([fleet.servers.get(str(url)) or self._make(url) for url in wanted])
            watch.start()
        for server in fleet.servers.values():
            if server.removed is not (server.name in removed):
                server.removed = not server.removed
                fleet.refresh(server)

    # -- clusters of other regions (pinyon.frontdoor.clusters.Adopted)

    def serves(self, told: Told) -> bool:
        return bool(told.upstreams)

    def begin(self, name: str, told: Told) -> Watch:
        return Watch(ServerFleet([], self.models, self._clock, name), self._times, self._clock)

    def told(self, cluster: Watch, told: Told) -> None:
        self._use(cluster, _urls(told.upstreams))

    def end(self, cluster: Watch) -> Coroutine[Any, Any, None]:
        # Requests there run on, as they hold the fleet; the last one at a server closes it. Servers must leave before
        # their models' layers do.
        cluster.fleet.use([])
        return cluster.close()


def _urls(told: Sequence[str]) -> list[UpstreamUrl]:
    """Returns the URLs that requests can be sent to."""
    found: list[UpstreamUrl] = []
    for text in told:
        if "://" not in text:
            continue
        try:
            found += parse_upstreams(text)
        except InvalidArgument as error:
            _log.warning("the controller names a server that cannot be asked: %s", error.message)
    return found
