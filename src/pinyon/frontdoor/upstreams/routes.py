"""The HTTP routes of a load balancer in front of other people's servers."""

from __future__ import annotations

from pinyon.frontdoor.routes import Route, Routes
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.fleet import ServerFleet
from pinyon.frontdoor.upstreams.forwarding import Forwarding

LABELS = {
    "/v1/chat/completions": "chat",
    **{f"/v1/{name}": name for name in ("completions", "responses", "messages", "embeddings", "rerank", "score")},
}
"""The labels of the metric by path; all other paths share one."""
NOT_FOR_ONE = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""The paths that change one server of many; clients that may only ask for text must not do that."""


class UpstreamRoutes(Routes):
    """The routes: every POST below ``/v1/`` is forwarded; lists of models are answered here."""

    def __init__(self, forwarding: Forwarding, models: ServedModels, fleet: ServerFleet) -> None:
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
    """Returns whether a path is forwarded: for the server, too, it must be below ``/v1/``, to reach nothing else."""
    if not path.startswith("/v1/") or path in NOT_FOR_ONE or len(path) == len("/v1/"):
        return False
    return not any(part in ("", ".", "..") for part in path[len("/v1/") :].split("/")) and path.isprintable()
