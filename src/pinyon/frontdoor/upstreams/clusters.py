"""Servers that are served from here: the region's own, and those of regions whose load balancers have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.federation.view import Cluster as Told
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.fleet import Fleet
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.watch import Watch, WatchTimes
from pinyon.http.url import UpstreamUrl, parse_upstreams
from pinyon.runtime.logging import get_logger

__all__ = ["UpstreamClusters"]

ADOPTED_MAX = 64

_log = get_logger("lb.clusters")


class _Adopted:
    """One of another region."""

    def __init__(self, region: str, fleet: Fleet, watch: Watch) -> None:
        self.region, self.fleet, self.watch = region, fleet, watch


class UpstreamClusters:
    """``start`` → ``own`` and ``adopt`` whenever that changes → ``close``. ``make`` gives a server for a URL."""

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
        self._models = models
        self._make = make
        self._times = times
        self._clock = clock
        self._watch = Watch(fleet, times, clock)
        self._adopted: dict[str, _Adopted] = {}
        self._let_go: set[asyncio.Task[None]] = set()
        self._dropped: list[Fleet] = []
        """That have been given back; requests may run there still."""

    def start(self) -> None:
        self._watch.start()

    async def close(self) -> None:
        for name in list(self._adopted):
            self._drop(name)
        await asyncio.gather(*self._let_go, return_exceptions=True)
        for fleet in self._dropped:
            fleet.close()
        await self._watch.close()
        self.fleet.close()

    def targets(self, cluster: str) -> Fleet:
        """Of an adopted one."""
        return self._adopted[cluster].fleet

    def servers(self) -> Iterator[tuple[Fleet, Server]]:
        """All, each name once."""
        seen = set()
        for fleet in (self.fleet, *[each.fleet for each in self._adopted.values()]):
            for server in fleet.servers.values():
                if server.name not in seen:
                    seen.add(server.name)
                    yield fleet, server

    # -- what the controller says

    def own(self, clusters: Sequence[Told]) -> None:
        """Servers that somebody added to the region's own, and took out of it."""
        added = [url for each in clusters for url in _urls(each.added)]
        removed = {str(url) for each in clusters for url in _urls(each.removed)}
        self._use(self.fleet, self._watch, [*self._urls, *added], removed)

    def adopt(self, wanted: Mapping[str, Told]) -> None:
        """From now on serve these for others: those that have servers."""
        wanted = {name: told for name, told in wanted.items() if told.upstreams}
        for name in list(self._adopted):
            if name not in wanted or wanted[name].region != self._adopted[name].region:
                self._drop(name)
        for name, told in list(wanted.items())[:ADOPTED_MAX]:
            if name not in self._adopted:
                _log.warning("serving %s for its load balancers, which have failed", name)
                self._models.adopt(name, told.region)
                fleet = Fleet([], self._models, self._clock, name)
                self._adopted[name] = _Adopted(told.region, fleet, Watch(fleet, self._times, self._clock))
            adopted = self._adopted[name]
            self._use(adopted.fleet, adopted.watch, _urls(told.upstreams), frozenset())

    def _use(self, fleet: Fleet, watch: Watch, urls: Sequence[UpstreamUrl], removed: set[str] | frozenset[str]) -> None:
        wanted = dict.fromkeys(urls)
        if [str(url) for url in wanted] != list(fleet.servers):
            fleet.use([fleet.servers.get(str(url)) or self._make(url) for url in wanted])
            watch.start()
        for server in fleet.servers.values():
            if server.removed is not (server.name in removed):
                server.removed = not server.removed
                fleet.refresh(server)

    def _drop(self, name: str) -> None:
        _log.warning("%s is served by its own load balancer again", name)
        adopted = self._adopted.pop(name)
        adopted.fleet.use([])
        self._dropped = [fleet for fleet in self._dropped if fleet.leaves]
        self._dropped.append(adopted.fleet)
        self._models.give_back(name)
        # What runs there runs on: who has it has its fleet.
        task = asyncio.create_task(adopted.watch.close(), name=f"let go of {name}")
        self._let_go.add(task)
        task.add_done_callback(self._let_go.discard)


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
