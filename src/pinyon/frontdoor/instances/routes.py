"""What the HTTP front door offers of our own instances, by path."""

from __future__ import annotations

import json
import time

from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.instances.completions import Completions
from pinyon.frontdoor.instances.models import Models
from pinyon.frontdoor.instances.prompts import Prompts
from pinyon.frontdoor.instances.tokenize import Tokenization
from pinyon.frontdoor.routes import Route
from pinyon.http.answer import JSON
from pinyon.openai.format import model_object
from pinyon.openai.openapi import openapi_document

__all__ = ["OwnRoutes"]

_OTHERS = {
    "assistants": "The Assistants API",
    "audio": "Speech",
    "batches": "The Batch API",
    "conversations": "The Conversations API",
    "embeddings": "Making embeddings",
    "files": "The Files API",
    "fine_tuning": "Fine-tuning",
    "images": "Making images",
    "messages": "Anthropic's Messages API",
    "moderations": "Moderation",
    "realtime": "The Realtime API",
    "rerank": "Reranking",
    "responses": "The Responses API",
    "score": "Scoring",
    "threads": "The Assistants API",
}
"""What clients ask for that generation has no part in, by what follows ``/v1/``."""


class OwnRoutes:
    """What our own instances are asked for."""

    def __init__(self, completions: Completions, tokenization: Tokenization, models: Models) -> None:
        self._completions = completions
        self._models = models
        self._created_s = int(time.time())
        found = [
            Route("completions", "POST", True, "/v1/completions", generate=completions.completion, queued=True),
            Route("chat", "POST", True, "/v1/chat/completions", generate=completions.chat, queued=True),
            Route("tokenize", "POST", True, "/tokenize", generate=tokenization.tokenize),
            Route("detokenize", "POST", True, "/detokenize", generate=tokenization.detokenize),
            Route("models", "GET", True, "/v1/models", self._list),
            Route("openapi", "GET", False, "/openapi.json", lambda _: (openapi_document(), JSON)),
        ]
        self._routes = {route.place: route for route in found}
        self._model = Route("models", "GET", True, "/v1/models/*", self._retrieve)

    @property
    def places(self) -> tuple[str, ...]:
        return (*self._routes, self._model.place)

    def find(self, path: str) -> Route | None:
        route = self._routes.get(path)
        return self._model if route is None and path.startswith("/v1/models/") else route

    def nowhere(self, path: str) -> str:
        first, _, rest = path.removeprefix("/").partition("/")
        if f"/v1{path}" in self._routes:
            return f"It is /v1{path}: a client's base URL ends with /v1."
        what = _OTHERS.get(rest.partition("/")[0]) if first == "v1" else None
        return f"{what} is not served here: there are /v1/chat/completions and /v1/completions." if what else ""

    def check_place(self, client: Client) -> None:
        self._completions.check_place(client)

    def _list(self, head: Head) -> tuple[bytes, bytes]:
        return json.dumps({"object": "list", "data": [self._object(each) for each in self._models]}).encode(), JSON

    def _retrieve(self, head: Head) -> tuple[bytes, bytes]:
        name = head.path.removeprefix("/v1/models/")
        return json.dumps(self._object(self._models.of(name))).encode(), JSON

    def _object(self, prompts: Prompts) -> dict[str, object]:
        return model_object(prompts.model, self._created_s, prompts.max_context())
