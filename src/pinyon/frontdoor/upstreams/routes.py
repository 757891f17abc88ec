"""What the HTTP front door offers where other people's servers stand behind it."""

from __future__ import annotations

from pinyon.frontdoor.routes import Route, Routes
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.fleet import Fleet
from pinyon.frontdoor.upstreams.forwarding import Forwarding

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


class UpstreamRoutes(Routes):
    """Whatever is posted to ``/v1/`` goes on; what is known of models is said here."""

    def __init__(self, forwarding: Forwarding, models: ServedModels, fleet: Fleet) -> None:
        super().__init__(
            [
                Route(label, "POST", True, path, generate=forwarding.serve, queued=True)
                for path, label in LABELS.items()
            ],
            forwarding.admission.check,
            fleet.described,
            models.of,
        )
        self._other = Route("v1", "POST", True, "/v1/*", generate=forwarding.serve, queued=True)

    @property
    def places(self) -> tuple[str, ...]:
        return (*super().places, self._other.place)

    def find(self, path: str) -> Route | None:
        return super().find(path) or (self._other if passes(path) else None)

    def nowhere(self, path: str) -> str:
        if path in NOT_FOR_ONE:
            return "It changes one server of many: ask that one itself."
        return super().nowhere(path)


def passes(path: str) -> bool:
    """Below ``/v1/``, and where a server would look for it as well: other paths of it are nobody's business."""
    if not path.startswith("/v1/") or path in NOT_FOR_ONE or len(path) == len("/v1/"):
        return False
    return not any(part in ("", ".", "..") for part in path[len("/v1/") :].split("/")) and path.isprintable()
