"""Servers that are served from here: the region's own, and those of regions whose load balancers have failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.federation.view import Cluster as Told
from pinyon.frontdoor.clusters import Adopted
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.fleet import Fleet
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.url import UpstreamUrl, parse_upstreams
from pinyon.frontdoor.upstreams.watch import Watch, WatchTimes
from pinyon.runtime.logging import get_logger

_log = get_logger("lb.clusters")


class UpstreamClusters(Adopted[Watch]):
    """``start`` → ``own`` and ``adopt`` whenever that changes → ``close``. ``make`` gives a server for a URL. A cluster
    is its servers' fleet, with what watches it."""

    def __init__(
        self,
        fleet: Fleet,
        urls: Sequence[UpstreamUrl],
        models: ServedModels,
        make: Callable[[UpstreamUrl], Server],
        times: WatchTimes,
        clock: Clock,
    ) -> None:
        """``fleet`` has the servers of the ``urls``, which are this load balancer's own."""
        self.fleet = fleet
        self._urls = tuple(urls)
        super().__init__(models)
        self._make = make
        self._times = times
        self._clock = clock
        self._watch = Watch(fleet, times, clock)
        self._dropped: list[Fleet] = []
        """That have been given back; requests may run there still."""

    def start(self) -> None:
        self._watch.start()

    async def close(self) -> None:
        await self.give_all_back()
        for fleet in self._dropped:
            fleet.close()
        await self._watch.close()
        self.fleet.close()

    def targets(self, cluster: str) -> Fleet:
        """Of an adopted one."""
        return self.adopted[cluster].fleet

    def servers(self) -> Iterator[tuple[Fleet, Server]]:
        """All, each name once."""
        seen = set()
        for watch in (self._watch, *self.adopted.values()):
            for server in watch.fleet.servers.values():
                if server.name not in seen:
                    seen.add(server.name)
                    yield watch.fleet, server

    # -- what the controller says

    def own(self, clusters: Sequence[Told]) -> None:
        """Servers that somebody added to the region's own, and took out of it."""
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
        return Watch(Fleet([], self.models, self._clock, name), self._times, self._clock)

    def told(self, cluster: Watch, told: Told) -> None:
        self._use(cluster, _urls(told.upstreams))

    def end(self, cluster: Watch) -> Coroutine[Any, Any, None]:
        # What runs there runs on: who has it has its fleet. Servers leave before their models' layers do.
        cluster.fleet.use([])
        self._dropped = [fleet for fleet in self._dropped if fleet.leaves]
        self._dropped.append(cluster.fleet)
        return cluster.close()


def _urls(told: Sequence[str]) -> list[UpstreamUrl]:
    """Those that can be asked."""
    found: list[UpstreamUrl] = []
    for text in told:
        if "://" not in text:
            continue
        try:
            found += parse_upstreams(text)
        except InvalidArgument as error:
            _log.warning("the controller names a server that cannot be asked: %s", error.message)
    return found
