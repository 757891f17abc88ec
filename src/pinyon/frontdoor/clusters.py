"""The clusters that are served from here: the region's own, and those of regions without a live load balancer
(SkyWalker §4.2).

The regional controller says which. Requests in a cluster that is given back run to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pinyon.federation.view import Cluster as Told
from pinyon.frontdoor.served_models import ServedModels
from pinyon.runtime.logging import get_logger

ADOPTED_MAX = 64

C = TypeVar("C")

_log = get_logger("lb.clusters")


class Adopted(Generic[C]):
    """The adopted clusters: ``start`` → ``own`` and ``adopt`` at each change → ``close``, which gives all back. Each
    kind of cluster defines how one begins and ends."""

    def __init__(self, models: ServedModels) -> None:
        self.models = models
        self.adopted: dict[str, C] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def adopt(self, wanted: Mapping[str, Told]) -> None:
        """Serves these clusters for others from now on, as far as they can be served from here."""
        wanted = {name: told for name, told in wanted.items() if self.serves(told)}
        for name, cluster in list(self.adopted.items()):
            if name not in wanted or not self.is_same(cluster, wanted[name]):
                self._give_back(name)
        for name, told in list(wanted.items())[:ADOPTED_MAX]:
            if name not in self.adopted:
                _log.warning("serving %s for its load balancers, which have failed", name)
                self.models.adopt(name, told.region)
                self.adopted[name] = self.begin(name, told)
            self.told(self.adopted[name], told)

    async def give_all_back(self) -> None:
        for name in list(self.adopted):
            self._give_back(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _give_back(self, name: str) -> None:
        _log.warning("%s is served by its own load balancer again", name)
        cluster = self.adopted.pop(name)
        task = asyncio.create_task(self.end(cluster), name=f"let go of {name}")
        self.models.give_back(name)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # -- implemented by each kind of cluster

    def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def own(self, clusters: Sequence[Told]) -> None:
        """Takes what the controller says about the region's own clusters."""
        raise NotImplementedError

    def serves(self, told: Told) -> bool:
        """Returns whether the cluster is of this kind."""
        raise NotImplementedError

    def is_same(self, cluster: C, told: Told) -> bool:
        """Returns whether that cluster is the one served already; otherwise, the old one ends first."""
        return True

    def begin(self, name: str, told: Told) -> C:
        raise NotImplementedError

    def told(self, cluster: C, told: Told) -> None:
        """Takes what the controller says about a cluster that is served."""
        raise NotImplementedError

    def end(self, cluster: C) -> Coroutine[Any, Any, None]:
        """Stops listening to a cluster that is given back. Requests that run there run on."""
        raise NotImplementedError
