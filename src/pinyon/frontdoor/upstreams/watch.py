"""The watch over servers: whether they answer, which models they serve, and how busy they are.

For each server, one task asks every second whether it is well, and now and then for its models. Another task asks for
its load ten times a second (SkyWalker §4.1), one question at a time, so that slow servers are asked less often. A
report is valid for about a second (as the pushing rule decides), so a server without a report gets nothing new. If a
server is well but never reports, its outstanding requests are counted instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.failures import Absent, Broke
from pinyon.frontdoor.upstreams.fleet import ServerFleet
from pinyon.frontdoor.upstreams.reading import MODEL_CHARS_MAX
from pinyon.frontdoor.upstreams.server import Server
from pinyon.routing.server_load import ServerKind, kind_of_page, read_load
from pinyon.routing.target import Report
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

PAGE_BYTES_MAX = 4 << 20
HEALTH_BYTES_MAX = 64 << 10
FAILURES = 2
"""The failures in a row after which a listening server counts as not well."""
MISSES = 4
"""The missed reports in a row after which a server counts as one that never reports its load."""
REST = 5
"""The pause before a server is asked for its load again, as a multiple of its last answer's duration. It is shorter if
the report would be outdated before the next one (:class:`pinyon.routing.pushing.PendingSettings`)."""
FRESH_S = 0.8
"""The longest time between two answers that each take at most half of it. An answer that takes longer than this says
nothing about the present."""
MODELS_S = 10.0
"""The time between two questions for a server's models."""
METRICS_S = 60.0
"""The time between two questions for metrics to a server whose metrics we did not understand."""
ANSWER_S: Final = 5.0
BYTES_MAX: Final = 1 << 20
SERVER_MODELS_MAX: Final = 256
"""The maximum number of models of a server: a model and its adapters."""
DESCRIPTION_BYTES_MAX: Final = 4 << 10
"""The maximum size of a model's description; a longer one is dropped, and only the name stays."""

_log = get_logger("lb.upstreams")


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """The times of the watch, in seconds. ``load_s``: between two load reports. ``health_s``: between two health
    checks. ``answer_s``: an unanswered question has failed after this time."""

    load_s: float = 0.1
    health_s: float = 1.0
    answer_s: float = 2.0


class Watch:
    """The watch over a fleet: ``start`` → ``close``."""

    def __init__(self, fleet: ServerFleet, times: WatchTimes, clock: Clock) -> None:
        self.fleet, self.times, self.clock = fleet, times, clock
        self._tasks: dict[Server, list[asyncio.Task[None]]] = {}

    def start(self) -> None:
        """Watches the present servers, and no others; must be called at each change."""
        servers = list(self.fleet.servers.values())
        for server in [each for each in self._tasks if each not in servers]:
            for task in self._tasks.pop(server):
                task.cancel()
        for server in servers:
            if server not in self._tasks:
                asker = _Asker(self, server)
                self._tasks[server] = [
                    asyncio.create_task(self._forever(server, asker.health), name="upstream health"),
                    asyncio.create_task(self._forever(server, asker.load), name="upstream load"),
                ]

    async def close(self) -> None:
        tasks = [task for each in self._tasks.values() for task in each]
        self._tasks.clear()
        await ended(*tasks)

    async def _forever(self, server: Server, ask: Callable[[], Awaitable[float]]) -> None:
        while True:
            try:
                pause_s = await ask()
            except Exception:
                _log.exception("how %s is cannot be found out", server.name)
                pause_s = self.times.health_s
            await asyncio.sleep(pause_s)


class _Asker:
    """The questions to one server. Each returns the pause before the next one of its kind, in seconds."""

    def __init__(self, watch: Watch, server: Server) -> None:
        self._server = server
        self._fleet, self._times, self._clock = watch.fleet, watch.times, watch.clock
        self._health_path, self._load_path = b"/health", b"/metrics"
        self._failures = 0
        """The failures in a row of the health check."""
        self._misses = 0
        """The failures in a row to get the server's load."""
        self._models_due_s = self._metrics_due_s = 0.0

    # -- health and models

    async def health(self) -> float:
        """Asks whether the server is well and, now and then, for its models."""
        server = self._server
        try:
            status = await self._status()
            if status == 200:
                self._failures = 0
                if server.gone or self._clock() >= self._models_due_s:
                    await self._ask_models()
                elif server.models:
                    self._fleet.found(server)
                return self._times.health_s
            why, gone, silent = f"its {self._health_path.decode()} answers {status}", False, False
        except Unavailable as error:
            said, gone = error.message, isinstance(error, Absent)
            why = said[:1].lower() + said[1:].rstrip(".")  # a part of another sentence
            silent = isinstance(error, Absent | Broke) and error.silent
        self._failures += 1
        if gone or self._failures >= FAILURES or not server.healthy:
            self._models_due_s = 0.0  # it may come back with other models
            self._fleet.missing(server, why, gone=gone, silent=silent and self._failures >= FAILURES)
        return self._times.health_s

    async def _status(self) -> int:
        server, kind = self._server, self._server.kind
        if kind is not None and kind.health:
            self._health_path = kind.health
        status, _ = await server.ask(self._health_path, self._times.answer_s, HEALTH_BYTES_MAX)
        if status in (404, 405, 501) and self._health_path == b"/health":
            self._health_path = b"/v1/models"  # every server has that
            status, _ = await server.ask(self._health_path, self._times.answer_s, PAGE_BYTES_MAX)
        return status

    async def _ask_models(self) -> None:
        server = self._server
        found = await discover_models(server)
        if isinstance(found, str):
            self._fleet.missing(server, found)
            return
        self._models_due_s = self._clock() + MODELS_S
        self._fleet.listed(server, found)
        self._fleet.found(server)

    # -- load

    async def load(self) -> float:
        """Asks for the server's load."""
        server = self._server
        if not server.healthy:
            if server.gone:  # another kind of server may come back in its place
                self._metrics_due_s = 0.0
                server.kind = None
            return self._times.load_s
        if server.kind is None and self._clock() >= self._metrics_due_s:
            self._metrics_due_s = self._clock() + METRICS_S
            await self._find_kind()
        if server.kind is None:
            self._fleet.report(server, Report(), self._fleet.marks(server))
            return self._times.load_s
        began_s = self._clock()
        marks = self._fleet.marks(server)
        try:
            status, page = await server.ask(self._load_path, self._times.answer_s, PAGE_BYTES_MAX)
            load = read_load(server.kind, page) if status == 200 else None
        except Unavailable:  # the health check finds out whether the server is well
            load = None
        took_s = self._clock() - began_s
        if load is None or took_s > FRESH_S:
            self._missed()
        else:
            self._misses = 0
        if load is not None:
            if capacity := server.room_for:
                load = Report(load.pending, load.running, server.share_of(max(0, capacity - load.running)))
            self._fleet.report(server, load, marks)
        return max(self._times.load_s, min(REST * took_s, FRESH_S - 2 * took_s))

    def _missed(self) -> None:
        self._load_path = b"/metrics"
        self._misses += 1
        if self._misses >= MISSES:
            _log.warning("%s shows no load any longer: its outstanding requests are counted", self._server.name)
            self._misses = 0
            self._server.kind = None

    async def _find_kind(self) -> None:
        server = self._server
        try:
            status, page = await server.ask(b"/metrics", self._times.answer_s, PAGE_BYTES_MAX)
            kind = kind_of_page(page) if status == 200 else None
            if kind is None:
                _log.info("%s shows no load: its outstanding requests are counted", server.name)
                return
            server.kind = kind
            server.told_capacity = await discover_capacity(server, kind)
            _log.info("%s is %s, capacity %d", server.name, kind.name, server.room_for)
            # Some servers compute only the metrics that are asked for.
            few = b"/metrics?name[]=%b&name[]=%b" % (kind.pending, kind.running)
            status, page = await server.ask(few, self._times.answer_s, PAGE_BYTES_MAX)
            self._load_path = few if status == 200 and read_load(kind, page) is not None else b"/metrics"
        except Unavailable:
            return


async def discover_models(server: Server) -> dict[str, Mapping[str, Any]] | str:
    """Returns a server's descriptions of its models by name; or the reason why there are none, without a capital
    letter. Raises :class:`Unavailable`."""
    status, body = await server.ask(b"/v1/models", ANSWER_S, BYTES_MAX)
    if status in (401, 403):
        return "it wants an API key, or another one (--upstream-api-key-file)"
    if status == 404:  # an old text-generation-inference
        name = (await _told(server, b"/info")).get("model_id")
        return {str(name): {}} if _is_name(name) else "it has no /v1/models"
    if status != 200:
        return f"its /v1/models answers {status}"
    try:
        listed = json.loads(body)["data"]
        found: dict[str, Mapping[str, Any]] = {}
        for each in listed[:SERVER_MODELS_MAX]:
            if _is_name(each["id"]):
                found[each["id"]] = each if _can_be_shown(each) else {}
    except (ValueError, LookupError, TypeError, RecursionError):
        return "its /v1/models is no list of models"
    return found or "it lists no model"


def _can_be_shown(description: Mapping[str, Any]) -> bool:
    """Returns whether a description is small and valid JSON: Python also parses numbers that JSON does not have."""
    try:
        return len(json.dumps(description, allow_nan=False)) <= DESCRIPTION_BYTES_MAX
    except ValueError:
        return False


async def discover_capacity(server: Server, kind: ServerKind) -> int:
    """Returns the requests in a server's batch; 0 if unknown, as for vLLM. Raises :class:`Unavailable`."""
    for path in kind.paths:
        if capacity := kind.capacity(await _told(server, path)):
            return capacity
    return 0


async def _told(server: Server, path: bytes) -> Mapping[str, Any]:
    """Returns the JSON object of a 200 answer; an empty one for other statuses and content. Raises as
    :meth:`Server.ask`."""
    status, body = await server.ask(path, ANSWER_S, BYTES_MAX)
    try:
        value = from_json(body) if status == 200 else None
    except ValueError:
        value = None
    return value if type(value) is dict else {}


def _is_name(name: Any) -> bool:
    return type(name) is str and 0 < len(name) <= MODEL_CHARS_MAX and name.isprintable()
