"""The HTTP front door as a bare ASGI application: routes, bodies, errors.

No framework: per-request CPU is what a load balancer is judged by. The server cancels the task when its client
disconnects, so a request ends in whatever phase it is in (:mod:`services.lb.http_server`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from pinyon.core.errors import Internal, PinyonError, Unavailable
from pinyon.runtime.logging import get_logger
from services.lb.auth import ApiKeys
from services.lb.http_answer import Message, Receive, Send, answer, refuse
from services.lb.http_completions import Completions
from services.lb.http_head import Head, HttpError, read_head
from services.lb.metrics import LbMetrics
from services.lb.openai_format import model_object
from services.lb.prompts import Prompts

__all__ = ["HttpApp", "HttpLimits"]

Handler = Callable[[Head, Receive, Send], Awaitable[int]]

CLIENT_GONE = 499
DRAIN_FACTOR = 4
"""A body up to this many times the limit is read to its end, so that its sender sees the 413 and not a reset."""
SHOWN_CHARS = 200

_log = get_logger("lb.http")


@dataclass(frozen=True)
class HttpLimits:
    """Bytes of one request."""

    body_bytes: int
    head_bytes: int


class HttpApp:
    """``draining`` is set when the process is about to end: readiness fails, requests still run."""

    def __init__(
        self,
        completions: Completions,
        prompts: Prompts,
        servable: Callable[[], bool],
        keys: ApiKeys,
        metrics: LbMetrics,
        registry: CollectorRegistry,
        limits: HttpLimits,
    ) -> None:
        self._completions = completions
        self._prompts = prompts
        self._servable = servable
        self._keys = keys
        self._metrics = metrics
        self._registry = registry
        self._limits = limits
        self._created_s = int(time.time())
        self.draining = False
        # path: (label of the metric, method, needs a key, handler)
        self._routes: dict[str, tuple[str, str, bool, Handler]] = {
            "/v1/completions": ("completions", "POST", True, self._completion),
            "/v1/chat/completions": ("chat", "POST", True, self._chat),
            "/v1/models": ("models", "GET", True, self._list_models),
            "/health": ("health", "GET", False, self._live),
            "/health/live": ("health", "GET", False, self._live),
            "/health/ready": ("health", "GET", False, self._ready),
            "/metrics": ("metrics", "GET", False, self._prometheus),
        }
        self._model_route = ("models", "GET", True, self._retrieve_model)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route, status = "other", CLIENT_GONE
        try:
            try:
                path, method = scope["path"], scope["method"]
                entry = self._routes.get(path)
                if entry is None:
                    if not path.startswith("/v1/models/"):
                        raise HttpError(404, f"Invalid URL ({method} {path[:SHOWN_CHARS]})")
                    entry = self._model_route
                route, wanted, guarded, handler = entry
                if method != wanted and not (method == "HEAD" and wanted == "GET"):
                    allow = {b"allow": wanted.encode()}
                    raise HttpError(405, f"Not allowed to {method} on {path[:SHOWN_CHARS]}.", allow)
                head = read_head(scope, self._limits.head_bytes)
                if guarded:
                    head.client = self._keys.client(head.authorization)
                status = await handler(head, receive, send)
            except PinyonError as error:
                status = await refuse(send, error, scope.get("request_id", ""))
        except asyncio.CancelledError:
            return  # the client is gone, or the process ends: all is released, and nobody reads an answer
        except Exception:
            _log.exception("uncaught error in %s", route, extra={"request_id": scope.get("request_id", "")})
            status = await refuse(send, Internal("internal error"), scope.get("request_id", ""))
        finally:
            self._metrics.answered(route, status)

    # -- generation

    async def _completion(self, head: Head, receive: Receive, send: Send) -> int:
        return await self._completions.completion(head, await self._body(head, receive), send)

    async def _chat(self, head: Head, receive: Receive, send: Send) -> int:
        return await self._completions.chat(head, await self._body(head, receive), send)

    async def _body(self, head: Head, receive: Receive) -> bytes:
        """The whole body. Raises :class:`HttpError` 413 when it is too large; that it comes in time is the server's."""
        limit = self._limits.body_bytes
        if head.content_length > limit and (head.expects_continue or head.content_length > DRAIN_FACTOR * limit):
            raise _too_large(limit)
        size, parts, more = 0, [], True
        while more and size <= DRAIN_FACTOR * limit:
            message = await receive()
            if message["type"] != "http.request":
                raise asyncio.CancelledError  # disconnected
            more = message["more_body"]
            size += len(message["body"])
            if size <= limit:
                parts.append(message["body"])
        if size > limit:
            raise _too_large(limit)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # -- everything else

    async def _list_models(self, head: Head, receive: Receive, send: Send) -> int:
        models = [model_object(self._prompts.model, self._created_s, self._prompts.max_context())]
        return await answer(send, 200, json.dumps({"object": "list", "data": models}).encode())

    async def _retrieve_model(self, head: Head, receive: Receive, send: Send) -> int:
        name = head.path.removeprefix("/v1/models/")
        self._prompts.check_model(name)
        model = model_object(name, self._created_s, self._prompts.max_context())
        return await answer(send, 200, json.dumps(model).encode())

    async def _live(self, head: Head, receive: Receive, send: Send) -> int:
        return await answer(send, 200, b'{"status":"ok"}')

    async def _ready(self, head: Head, receive: Receive, send: Send) -> int:
        if self.draining:
            raise Unavailable("draining")
        if not self._servable():
            raise Unavailable("No instance is available.", retry_after_s=1.0)
        return await answer(send, 200, b'{"status":"ready"}')

    async def _prometheus(self, head: Head, receive: Receive, send: Send) -> int:
        return await answer(send, 200, generate_latest(self._registry), CONTENT_TYPE_LATEST.encode())


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The request's body is larger than {limit} bytes.", {b"connection": b"close"})
