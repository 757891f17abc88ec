"""The HTTP routes of a load balancer in front of instances, some of which have a server of their own."""

from __future__ import annotations

from functools import partial

from pinyon.frontdoor.instances.completions import Completions
from pinyon.frontdoor.instances.routes import OwnRoutes
from pinyon.frontdoor.routes import Route
from pinyon.frontdoor.servers.door import ServerDoor
from pinyon.frontdoor.upstreams.routes import passes


class InstanceRoutes(OwnRoutes):
    """The routes of our own instances, which lead to servers for the models of those, and other paths of servers."""

    def __init__(self, completions: Completions, door: ServerDoor) -> None:
        super().__init__(completions)
        self._door, models = door, self._models
        for place, route in self._routes.items():
            if route.generate is not None:
                self._routes[place] = route._replace(generate=partial(door.choose, route.generate))
        self._models = lambda: [*models(), *door.described()]
        self._other = Route("v1", "POST", True, "/v1/*", generate=partial(door.choose, None), queued=True)

    @property
    def places(self) -> tuple[str, ...]:
        return (*super().places, self._other.place)

    def find(self, path: str) -> Route | None:
        return super().find(path) or (self._other if self._door.servers and passes(path) else None)
