"""The routes of the HTTP front door, by path."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.failures import unknown_model
from pinyon.frontdoor.head import Head
from pinyon.http.answer import JSON, Reply

Page = Callable[[Head], tuple[bytes, bytes]]
"""A function that returns the body and content type of an answer that is known at once."""
Generate = Callable[[Head, bytes | bytearray, Reply], Awaitable[int]]


class Route(NamedTuple):
    label: str
    """The label of the metric."""
    method: str
    guarded: bool
    """True if the route requires an API key, where there are any."""
    place: str
    """The path for the log: one of ours, never a client's invention."""
    page: Page | None = None
    generate: Generate | None = None
    queued: bool = False
    """True if a request needs a place in the queue."""


class Routes:
    """The routes of one kind of load balancer, and the list of models that each kind has."""

    def __init__(
        self,
        routes: Iterable[Route],
        check_place: Callable[[Client], None],
        models: Callable[[], Iterable[Mapping[str, Any]]],
        known: Callable[[str], object],
    ) -> None:
        """Collects the routes. The check ``check_place`` raises :class:`ResourceExhausted` if the queue has no place,
        so that no body is read in vain. The list of models shows ``models``. The check ``known`` raises
        :class:`PinyonError` for a name that is no model's."""
        self._routes = {route.place: route for route in routes}
        self._routes["/v1/models"] = Route("models", "GET", True, "/v1/models", self._list)
        self._model = Route("models", "GET", True, "/v1/models/*", self._retrieve)
        self.check_place = check_place
        self._models = models
        self._known = known

    @property
    def places(self) -> tuple[str, ...]:
        """The places of all routes."""
        return (*self._routes, self._model.place)

    def find(self, path: str) -> Route | None:
        route = self._routes.get(path)
        return self._model if route is None and path.startswith("/v1/models/") else route

    def nowhere(self, path: str) -> str:
        """Returns a hint, in a sentence, for a path that has no route; empty if there is none."""
        return f"It is /v1{path}: a client's base URL ends with /v1." if f"/v1{path}" in self._routes else ""

    def _list(self, head: Head) -> tuple[bytes, bytes]:
        return json.dumps({"object": "list", "data": list(self._models())}).encode(), JSON

    def _retrieve(self, head: Head) -> tuple[bytes, bytes]:
        name = head.path.removeprefix("/v1/models/")
        for model in self._models():
            if model["id"] == name:
                return json.dumps(model).encode(), JSON
        if name:
            self._known(name)
        raise unknown_model(name)
