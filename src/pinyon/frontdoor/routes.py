"""What the HTTP front door offers, by path."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.failures import unknown_model
from pinyon.frontdoor.head import Head
from pinyon.http.answer import JSON, Reply

Page = Callable[[Head], tuple[bytes, bytes]]
"""Body and content type of an answer that is known at once."""
Generate = Callable[[Head, bytes | bytearray, Reply], Awaitable[int]]


class Route(NamedTuple):
    label: str
    """Of the metric."""
    method: str
    guarded: bool
    """An API key is asked for, where there are any."""
    place: str
    """For the log: one of ours, never what a client made up."""
    page: Page | None = None
    generate: Generate | None = None
    queued: bool = False
    """It needs a place in the queue."""


class Routes:
    """Those of one kind of load balancer, and the list of models that each kind has."""

    def __init__(
        self,
        routes: Iterable[Route],
        check_place: Callable[[Client], None],
        models: Callable[[], Iterable[Mapping[str, Any]]],
        known: Callable[[str], object],
    ) -> None:
        """``check_place`` is for what is queued: it raises :class:`ResourceExhausted` if there is no place, for then
        there is no need to read a body. ``models`` are as the list of models shows them. ``known`` raises
        :class:`PinyonError` for a name that is no model's."""
        self._routes = {route.place: route for route in routes}
        self._routes["/v1/models"] = Route("models", "GET", True, "/v1/models", self._list)
        self._model = Route("models", "GET", True, "/v1/models/*", self._retrieve)
        self.check_place = check_place
        self._models = models
        self._known = known

    @property
    def places(self) -> tuple[str, ...]:
        """Of all routes."""
        return (*self._routes, self._model.place)

    def find(self, path: str) -> Route | None:
        route = self._routes.get(path)
        return self._model if route is None and path.startswith("/v1/models/") else route

    def nowhere(self, path: str) -> str:
        """What is so where nothing is found, in a sentence; empty: there is nothing to say."""
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
