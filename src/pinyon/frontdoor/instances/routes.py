"""The HTTP routes of a load balancer in front of our own instances, by path."""

from __future__ import annotations

import time
from functools import partial

from pinyon.frontdoor.instances.completions import Completions
from pinyon.frontdoor.instances.prompts import prompts_of
from pinyon.frontdoor.routes import Route, Routes
from pinyon.http.answer import JSON
from pinyon.openai.format import ChatFormat, CompletionFormat, model_object
from pinyon.openai.openapi import openapi_document
from pinyon.openai.parse import parse_chat, parse_completion

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
"""The APIs that clients ask for and that are not served here, by what follows ``/v1/``."""


class OwnRoutes(Routes):
    """The routes of our own instances."""

    def __init__(self, completions: Completions) -> None:
        models = completions.models
        created_s = int(time.time())
        complete = partial(completions.answer, parse_completion, CompletionFormat)
        chat = partial(completions.answer, parse_chat, ChatFormat)
        routes = (
            Route("completions", "POST", True, "/v1/completions", generate=complete, queued=True),
            Route("chat", "POST", True, "/v1/chat/completions", generate=chat, queued=True),
            Route("tokenize", "POST", True, "/tokenize", generate=completions.tokenize),
            Route("detokenize", "POST", True, "/detokenize", generate=completions.detokenize),
            Route("openapi", "GET", False, "/openapi.json", lambda _: (openapi_document(), JSON)),
        )
        super().__init__(
            routes,
            completions.admission.check,
            lambda: [model_object(each.model, created_s, each.max_context()) for each in models.values()],
            lambda name: prompts_of(models, name),
        )

    def nowhere(self, path: str) -> str:
        if said := super().nowhere(path):
            return said
        first, _, rest = path.removeprefix("/").partition("/")
        what = _OTHERS.get(rest.partition("/")[0]) if first == "v1" else None
        return f"{what} is not served here: there are /v1/chat/completions and /v1/completions." if what else ""
