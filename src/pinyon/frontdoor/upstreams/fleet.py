"""The servers of one cluster: which of them may get a request now, and the results of their requests."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

from pinyon.core.clock import Clock
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.served_model import ServedModel
from pinyon.frontdoor.served_models import MODELS_MAX, ServedModels
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.frontdoor.upstreams.server import Server
from pinyon.routing.breaker import Breaker
from pinyon.routing.layer import Layer
from pinyon.routing.target import Report, Target
from pinyon.runtime.logging import get_logger

REST_MAX_S = 10.0
"""The longest rest that a server gets, even if it asks for more."""

CONTEXT_MAX = 1 << 53
"""The maximum context in tokens: servers may report any number, and not all of them fit a float."""

_log = get_logger("lb.upstreams")


class ServerFleet:
    """The servers of one cluster, all on one event loop."""

    def __init__(self, servers: Sequence[Server], models: ServedModels, clock: Clock, cluster: str = "") -> None:
        """Takes the ``servers``; ``cluster`` names an adopted cluster of another region, and is empty for our own."""
        self.servers: dict[str, Server] = {}
        self.leaving: dict[str, Server] = {}
        """The servers that get no new requests, and still have some of ours."""
        self._models = models
        self.models: Mapping[str, ServedModel] = models.by_name
        self._clock = clock
        self._cluster = cluster
        self._breaker = Breaker()
        self.use(servers)

    def use(self, servers: Sequence[Server]) -> None:
        """Uses exactly these servers from now on. Requests on other servers continue."""
        wanted = {server.name: server for server in servers}
        for name, server in list(self.servers.items()):
            if name not in wanted:
                del self.servers[name]
                for model in server.models:
                    self._layer(model).leave(name)
                    self._models.drop_unserved(model)
                server.models = {}
                self._breaker.remove(name)
                self.leaving[name] = server
                self._let_go(name)
        for name, server in wanted.items():
            if name not in self.servers:
                self.servers[name] = self.leaving.pop(name, server)
                self._breaker.add(name, self._clock())
        self._models.tell()

    def _let_go(self, name: str) -> None:
        if name in self.leaving and not self.leaving[name].outstanding:
            self.leaving.pop(name).close()

    def _layer(self, model: str) -> Layer:
        layer = self._models.layer(model, self._cluster)
        assert layer is not None
        return layer

    def described(self) -> Iterator[Mapping[str, Any]]:
        """Yields each model as described by the server with the shortest context: more cannot be relied on."""
        for name in self.models:
            said = [self.servers[target.name].models.get(name) for target in self._layer(name)]
            best = min([each for each in said if each], key=_context, default={})
            yield {"object": "model", "created": 0, "owned_by": "upstream", **best, "id": name}

    # -- news about servers

    def listed(self, server: Server, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Records the models that a server serves; it serves no others."""
        for name in server.models:
            if name not in models and name in self.models:
                self._layer(name).leave(server.name)
                self._models.drop_unserved(name)
        server.models = dict(models)
        for name in list(server.models):
            known = self._models.add(name)
            if known is None:
                _log.warning("%s serves %s, and there are %d models already", server.name, name, MODELS_MAX)
                del server.models[name]
            elif self._layer(name).get(server.name) is None:
                self._join(self._layer(name), server)
        self.refresh(server)

    @staticmethod
    def _join(layer: Layer, server: Server) -> None:
        """Adds a server with an empty cache; :meth:`refresh` decides whether it gets requests, and announces it."""
        layer.join(server.name, server.room_for)
        layer.set_live(server.name, False)

    def found(self, server: Server) -> None:
        """Records that a server reports that it is well."""
        self._breaker.found(server.name)
        if server.gone:
            server.gone = False
            server.pool.drop_idle()
            for name in server.models:
                self._join(self._layer(name), server)
        if not server.healthy:
            server.healthy = True
            server.lacks = ""
            _log.info("%s serves", server.name)
        self.refresh(server)

    def missing(self, server: Server, why: str, *, gone: bool = False, silent: bool = False) -> None:
        """Records that a server is not well, or does not listen (``gone``). A ``silent`` server does not answer at all,
        unlike one that only takes nothing new. So its requests whose answers have not begun go elsewhere."""
        server.gone = server.gone or gone
        server.lacks = why
        if server.healthy:
            server.healthy = False
            _log.warning("%s gets no requests: %s", server.name, why)
        self.refresh(server)
        if silent:
            server.pool.break_unanswered()

    def refresh(self, server: Server) -> None:
        """Updates whether a server gets requests."""
        now_s = self._clock()
        live = server.healthy and self._breaker.allows(server.name, now_s)
        rests = now_s < server.rests_until_s or server.removed
        changed = False
        for name, _, target in self._targets(server):
            if target.capacity != server.room_for:
                target.capacity = server.room_for
                changed = True
            if target.live != live or target.draining != rests:
                target.live, target.draining = live, rests
                changed = True
                self.models[name].look()
        if changed:
            self._models.tell()

    def marks(self, server: Server) -> dict[str, int]:
        """Returns, by model, how many of our requests a server can know of when it is asked now."""
        return {name: target.sent for name, _, target in self._targets(server)}

    def _targets(self, server: Server) -> list[tuple[str, Layer, Target]]:
        """Returns the targets that a server is, one for each model, with the model's name and layer."""
        layers = [(name, self._layer(name)) for name in server.models]
        return [(name, layer, target) for name, layer in layers if (target := layer.get(server.name)) is not None]

    def report(self, server: Server, report: Report, marks: Mapping[str, int]) -> None:
        """Records a server's report; ``marks`` were taken when it was asked."""
        server.report = report
        now_s = self._clock()
        for name, layer, target in self._targets(server):
            seen = min(marks.get(name, 0), target.sent)
            layer.report(server.name, Report(report.pending, report.running, report.room, seen), now_s)
        self.refresh(server)
        self._models.tell()

    # -- a request's path; pinyon.frontdoor.upstreams.regions.RegionTargets has the same methods for other regions

    def _server(self, name: str) -> Server:
        """Returns the server of that name, even one that is leaving."""
        return self.servers.get(name) or self.leaving[name]

    def exchange(self, target: str, forward: Forward, first_byte_s: float) -> Awaitable[Answer]:
        """Sends a request and returns when the head of the answer has come; it must begin within ``first_byte_s``. The
        caller closes the answer, and watches the deadline. Raises :class:`Absent`, :class:`Broke` and
        :class:`ConnectionsFull` (:mod:`pinyon.frontdoor.failures`)."""
        return self._server(target).send(forward.url, forward.fields, forward.body, first_byte_s)

    def sent(self, target: str, forward: Forward) -> Target | None:
        """Counts a request that goes to the target; the result is for :meth:`ended`."""
        server = self._server(target)
        server.outstanding += 1
        if self._breaker.is_open(target):
            self._breaker.tried(target, self._clock())
            self.refresh(server)  # the breaker lets only this one request through, as a trial
        return self._layer(forward.served.name).sent(forward.route.routed, target)

    def ended(self, target: str, sent: Target | None) -> None:
        """Counts the end of a request, however it ended."""
        server = self._server(target)
        server.outstanding -= 1
        Layer.ended(sent)
        if self.leaving:
            self._let_go(target)

    def answered(self, target: str, began_s: float) -> None:
        """Records an answer that was good and complete."""
        server = self._server(target)
        was_open = self._breaker.is_open(target)
        self._breaker.succeeded(target, began_s, self._clock())
        grown = server.kind is None and server.learned.served(server.outstanding)
        if was_open or grown:
            self.refresh(server)

    def failed(self, target: str, *, absent: bool = False) -> None:
        """Records a failure that is the target's fault; ``absent`` if the target was not there."""
        self._breaker.failed(target, self._clock(), absent=absent)
        self.refresh(self._server(target))

    def refused(self, model: str, target: str, rest_s: float) -> None:
        """Records a refusal for lack of room; ``rest_s`` is the requested pause in seconds, 0 for none."""
        server = self._server(target)
        if server.kind is None:
            server.learned.refused(server.outstanding)
        if rest_s > 0 and any(each.healthy and each is not server for each in self.servers.values()):
            server.rests_until_s = self._clock() + min(rest_s, REST_MAX_S)
        self.refresh(server)

    def closed(self, server: Server) -> bool:
        """Returns whether the breaker keeps requests from the server because earlier ones failed."""
        return not self._breaker.allows(server.name, self._clock())

    # -- whether requests would be served (pinyon.frontdoor.readiness.Watched)

    def lacks(self) -> str:
        """Returns why no model is served, in words for people; empty if one is served."""
        if any(served.live for served in self.models.values()):
            return ""
        # Addresses are left out, as anybody may ask for this.
        reasons = sorted({server.lacks or "it is left out, as it failed" for server in self.servers.values()})
        return f"No server behind the load balancer can be used: {'; '.join(reasons[:4])}."

    def unserved(self) -> dict[str, str]:
        """Returns the models that no server would serve, and why."""
        return {
            name: f"No server of the model '{name}' is there." for name, each in self.models.items() if not each.live
        }

    async def look(self) -> None:
        """Does nothing: :class:`pinyon.frontdoor.upstreams.watch.Watch` looks at servers."""

    async def wait_change(self, timeout_s: float) -> None:
        """Waits until there may be room for more requests, at most ``timeout_s``."""
        await self._models.wait_news(timeout_s)

    def close(self) -> None:
        for server in (*self.servers.values(), *self.leaving.values()):
            server.close()


def _context(said: Mapping[str, Any]) -> float:
    length = said.get("max_model_len")
    return float(length) if type(length) is int and 0 <= length <= CONTEXT_MAX else float("inf")
