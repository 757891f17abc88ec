"""The HTTP front door: routes, keys, errors.

It uses no framework, as a load balancer is judged by its CPU time per request. The server cancels the task when its
client disconnects, so a request ends in whatever phase it is in (:mod:`pinyon.http.connection`)."""

from __future__ import annotations

import asyncio
import json
import platform
from math import ceil
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from pinyon import __version__
from pinyon.core.clock import Clock
from pinyon.core.compiled import compiled
from pinyon.core.errors import Internal, PinyonError, Unavailable
from pinyon.frontdoor.access_log import AccessLog
from pinyon.frontdoor.admission import RateLimited
from pinyon.frontdoor.auth import ApiKeys
from pinyon.frontdoor.cors import Cors
from pinyon.frontdoor.gzip import Inflater
from pinyon.frontdoor.head import Head, id_field, read_head, sent_id
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.readiness import Readiness
from pinyon.frontdoor.routes import Route, Routes
from pinyon.http.answer import JSON, HttpError, Reply, error_status, field
from pinyon.http.request import RequestHead
from pinyon.openai.format import error_body
from pinyon.runtime.logging import get_logger

CLIENT_GONE = 499
SHOWN_CHARS = 200
VERSION = json.dumps({"version": __version__, "compiled": compiled(), "python": platform.python_version()}).encode()
LIVE = b'{"status":"ok"}'

_log = get_logger("lb.http")


NOWHERE = Route("other", "", False, "other")
"""The route of requests for unknown paths."""


class HttpCall(Head):
    """One request for the app: its head and its route; see :class:`pinyon.http.state.Exchange`."""

    __slots__ = ("error", "fields", "route")

    def __init__(self, raw: RequestHead, arrived_s: float) -> None:
        super().__init__(raw.path, arrived_s, raw)
        self.route = NOWHERE
        self.error: PinyonError | None = None
        self.fields = b""

    @property
    def guarded(self) -> bool:
        return self.route.guarded

    @property
    def plain(self) -> bool:
        return self.route.generate is None


class HttpApp:
    """The app of the HTTP server, with the given ``routes`` and those that every load balancer has."""

    def __init__(
        self,
        routes: Routes,
        readiness: Readiness,
        keys: ApiKeys,
        metrics: DoorMetrics[Any],
        inflater: Inflater,
        cors: Cors,
        clock: Clock,
        access: AccessLog,
    ) -> None:
        self._routes = routes
        self._readiness = readiness
        self._keys = keys
        self._metrics = metrics
        self._inflater = inflater
        self._cors = cors if cors else None
        self._clock = clock
        self._access = access
        pages = [
            Route("version", "GET", False, "/version", lambda _: (VERSION, JSON)),
            Route("health", "GET", False, "/health", lambda _: (LIVE, JSON)),
            Route("health", "GET", False, "/health/live", lambda _: (LIVE, JSON)),
            Route("health", "GET", False, "/health/ready", self._ready),
            Route("metrics", "GET", False, "/metrics", lambda _: (metrics.page(clock), CONTENT_TYPE_LATEST.encode())),
        ]
        self._pages = {route.place: route for route in pages}

    @property
    def places(self) -> tuple[str, ...]:
        """The places of all routes, as the log names them."""
        return (*self._pages, *self._routes.places)

    # -- called by the server (pinyon.http.state.App)

    def open(self, head: RequestHead) -> HttpCall:
        """Returns the call with its client and route; refuses it before a byte of the body is kept, if need be."""
        call = HttpCall(head, self._clock())
        try:
            self._open(head, call)
        except PinyonError as error:
            call.error = error
            call.request_id = sent_id(head.fields) or call.request_id
        call.fields = id_field(call.request_id)
        if self._cors is not None:
            call.fields += self._cors.fields(head.fields, preflight=call.route.label == "preflight")
        return call

    def _open(self, head: RequestHead, call: HttpCall) -> None:
        path, method = head.path, head.method
        route = self._pages.get(path) or self._routes.find(path)
        if route is None:
            said = self._routes.nowhere(path)
            raise HttpError(404, f"Invalid URL ({method} {path[:SHOWN_CHARS]}){'. ' * bool(said)}{said}")
        if method == "OPTIONS" and self._cors is not None:
            route = Route("preflight", "OPTIONS", False, route.place, lambda _: (b"", b"text/plain"))
        call.route = route
        if method != route.method and not (method == "HEAD" and route.method == "GET"):
            allow = {b"allow": route.method.encode()}
            raise HttpError(405, f"Not allowed to {method} on {path[:SHOWN_CHARS]}.", allow)
        read_head(call, head.fields)
        if route.guarded:
            call.client = self._keys.client(call.authorization)
            call.holder = call.client.holder
        if route.queued:
            self._routes.check_place(call.client)

    def answer(self, call: HttpCall, body: bytes | bytearray, reply: Reply) -> None:
        """Answers with a page."""
        assert call.route.page is not None
        try:
            page, content_type = call.route.page(call)
        except PinyonError as error:
            self._refuse(call, error, reply)
            return
        reply.whole(200, page, content_type)
        self._answered(call, 200)

    async def serve(self, call: HttpCall, body: bytes | bytearray, reply: Reply) -> None:
        """Serves a generation. When its client leaves, it is cancelled, which releases everything."""
        generate = call.route.generate
        assert generate is not None
        try:
            if call.gzip:
                async with self._inflater.inflated(body, call.holder) as inflated:
                    status = await generate(call, inflated, reply)
            else:
                status = await generate(call, body, reply)
        except PinyonError as error:
            self._refuse(call, error, reply)
        except asyncio.CancelledError:
            self._answered(call, CLIENT_GONE)
            raise
        except Exception:
            _log.exception("uncaught error in %s", call.route.label, extra={"request_id": call.request_id})
            self._refuse(call, Internal("internal error"), reply)
        else:
            self._answered(call, status)

    def refusal(self, error: PinyonError, *, named: bool) -> tuple[int, bytes, bytes]:
        status, body, fields = error_answer(error)
        return status, body, fields if named else fields + id_field()

    def refused(self, call: HttpCall | None, status: int) -> None:
        if call is None:
            self._metrics.answered.add(("other", status))
        else:
            self._answered(call, status)

    def _refuse(self, call: HttpCall, error: PinyonError, reply: Reply) -> None:
        status, body, fields = error_answer(error)
        reply.whole(status, body, JSON, fields)
        self._answered(call, status)

    def _answered(self, call: HttpCall, status: int) -> None:
        route = call.route
        self._metrics.answered.add((route.label, status))
        if call.broken:
            self._metrics.broken.add((call.broken,))
        assert call.raw is not None
        quiet = not route.guarded and route is not NOWHERE
        self._access.answered(call.raw.method, route.place, status, call, quiet=quiet)

    def _ready(self, head: Head) -> tuple[bytes, bytes]:
        if missing := self._readiness.lacks():
            raise Unavailable(missing, retry_after_s=None if self._readiness.draining else 1.0)
        if some := self._readiness.watched.unserved():
            return json.dumps({"status": "ready", "lacks": some}).encode(), JSON
        return b'{"status":"ready"}', JSON


def error_answer(error: PinyonError) -> tuple[int, bytes, bytes]:
    """Returns status, OpenAI's error object and header fields; ``Retry-After`` only where a retry may help."""
    status = error_status(error)
    fields = b""
    if isinstance(error, HttpError):
        fields = b"".join(field(name, value) for name, value in error.headers.items())
    if isinstance(error, RateLimited):
        fields += error.fields
    if error.retry_after_s is not None:
        fields += field(b"retry-after", b"%d" % max(1, ceil(error.retry_after_s)))
    if status == 401:
        fields += field(b"www-authenticate", b"Bearer")
    return status, error_body(error, status), fields
