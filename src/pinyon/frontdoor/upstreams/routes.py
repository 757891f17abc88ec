"""What the HTTP front door offers where other people's servers stand behind it."""

from __future__ import annotations

import json

from pinyon.core.errors import NotFound
from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.routes import Route
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.fleet import Fleet
from pinyon.frontdoor.upstreams.forwarding import Forwarding
from pinyon.http.answer import JSON

__all__ = ["UpstreamRoutes", "passes"]

LABELS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}
"""Of the metric; all others are one."""
NOT_FOR_ONE = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""They change a server, and one of many at that: whoever may ask for text may not do so."""


class UpstreamRoutes:
    """Whatever is posted to ``/v1/`` goes on; what is known of models is said here."""

    def __init__(self, forwarding: Forwarding, models: ServedModels, fleet: Fleet) -> None:
        self._forwarding = forwarding
        self._models = models
        self._fleet = fleet
        self._forward = {
            path: Route(label, "POST", True, path, generate=forwarding.serve, queued=True)
            for path, label in LABELS.items()
        }
        self._other = Route("v1", "POST", True, "/v1/*", generate=forwarding.serve, queued=True)
        self._list = Route("models", "GET", True, "/v1/models", self._list_models)
        self._one = Route("models", "GET", True, "/v1/models/*", self._retrieve_model)

    @property
    def places(self) -> tuple[str, ...]:
        return (*self._forward, self._other.place, self._list.place, self._one.place)

    def find(self, path: str) -> Route | None:
        known = self._forward.get(path)
        if known is not None:
            return known
        if path == "/v1/models":
            return self._list
        if path.startswith("/v1/models/"):
            return self._one
        return self._other if passes(path) else None

    def nowhere(self, path: str) -> str:
        if path in NOT_FOR_ONE:
            return "It changes one server of many: ask that one itself."
        if f"/v1{path}" in self._forward:
            return f"It is /v1{path}: a client's base URL ends with /v1."
        return ""

    def check_place(self, client: Client) -> None:
        self._forwarding.check_place(client)

    def _list_models(self, head: Head) -> tuple[bytes, bytes]:
        return json.dumps({"object": "list", "data": list(self._fleet.described())}).encode(), JSON

    def _retrieve_model(self, head: Head) -> tuple[bytes, bytes]:
        name = head.path.removeprefix("/v1/models/")
        for described in self._fleet.described():
            if described["id"] == name:
                return json.dumps(described).encode(), JSON
        self._models.of(name or "?")
        raise NotFound(f"The model '{name[:128]}' does not exist or you do not have access to it.", field="model")


def passes(path: str) -> bool:
    """Below ``/v1/``, and where a server would look for it as well: other paths of it are nobody's business."""
    if not path.startswith("/v1/") or path in NOT_FOR_ONE or len(path) == len("/v1/"):
        return False
    return not any(part in ("", ".", "..") for part in path[len("/v1/") :].split("/")) and path.isprintable()
