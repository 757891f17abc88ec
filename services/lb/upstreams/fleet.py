"""All servers and the models that they serve: who may get a request now, and what became of those that did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument, NotFound, Unavailable
from pinyon.routing.breaker import Breaker
from pinyon.routing.layer import Layer
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.routing.target import Report, Target
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import TwoLayers
from pinyon.runtime.logging import get_logger
from services.lb.room import Hold
from services.lb.upstreams.answer import Answer
from services.lb.upstreams.exchange import Outgoing
from services.lb.upstreams.served import Served
from services.lb.upstreams.server import Server
from services.lb.ways import WaysOptions

__all__ = ["MODELS_MAX", "Fleet"]

MODELS_MAX = 1024
SHOWN_MAX = 8
REST_MAX_S = 10.0
"""A server that wants to be left alone for longer is asked sooner all the same."""

_log = get_logger("lb.upstreams")


class Fleet:
    """All on one event loop. ``changed`` is called when there may be room for more."""

    def __init__(
        self,
        servers: Sequence[Server],
        options: WaysOptions,
        clock: Clock,
        wait_s: float,
    ) -> None:
        """``wait_s``: so long may no server of a model be there before those that wait are told."""
        self.servers = {server.name: server for server in servers}
        self.changed: Callable[[], None] = _nobody
        self._routing, self._pushing = options.routing, options.pushing
        self._clock = clock
        self._wait_s = wait_s
        self._region, self._geography = options.region, options.geography
        self._breaker = Breaker()
        self._models: dict[str, Served] = {}
        self._by_number: dict[int, Served] = {}
        self._last_number = 0
        self._news = asyncio.Event()
        now_s = clock()
        for name in self.servers:
            self._breaker.add(name, now_s)

    # -- models

    @property
    def models(self) -> Mapping[str, Served]:
        return self._models

    def of(self, model: str) -> Served:
        """The one of that name; nothing is the only one there is. Raises :class:`NotFound`, :class:`InvalidArgument`,
        and :class:`Unavailable` while no model is known."""
        found = self._models.get(model)
        if found is not None:
            return found
        if not self._models:
            raise Unavailable("No server has said yet which models it serves.", retry_after_s=1.0)
        names = list(self._models)
        shown = f"{', '.join(names[:SHOWN_MAX])}{', …' if len(names) > SHOWN_MAX else ''}"
        if not model:
            if len(names) == 1:
                return self._models[names[0]]
            raise InvalidArgument(f"model must be given. Served here: {shown}.", field="model")
        raise NotFound(
            f"The model '{model[:128]}' does not exist or you do not have access to it. Served here: {shown}.",
            field="model",
        )

    def described(self) -> Iterator[Mapping[str, Any]]:
        """Each model as a server describes it. Of several, the shortest context is all that one can count on."""
        for name in self._models:
            best: Mapping[str, Any] = {}
            for target in self._models[name].layers.local:
                said = self.servers[target.name].models.get(name)
                if said is not None and (not best or _context(said) < _context(best)):
                    best = said
            yield {"object": "model", "created": 0, "owned_by": "upstream", **best, "id": name}

    # -- what the queue asks

    def is_open(self, number: int) -> bool:
        served = self._by_number.get(number)
        return served is None or served.has_room()  # who waits for what is no more must learn of it

    def on_grant(self, number: int) -> Hold | None:
        served = self._by_number.get(number)
        return None if served is None else served.hold()

    # -- policies

    def use_routing(self, choice: str) -> None:
        """Raises ``ValueError``. What was sent before is forgotten."""
        ROUTING_POLICIES.checked(choice)
        self._routing = choice
        for served in self._models.values():
            served.layers.local.use(policy=ROUTING_POLICIES.make(choice))
            served.layers.remote.use(policy=ROUTING_POLICIES.make(choice))

    def use_pushing(self, choice: str) -> None:
        """Raises ``ValueError``."""
        rule = PUSHING_RULES.make(choice)
        self._pushing = choice
        for served in self._models.values():
            served.layers.local.use(pushing=rule)
            served.layers.remote.use(pushing=rule)
        self._tell()

    # -- what is found out about servers

    def listed(self, server: Server, models: Mapping[str, Mapping[str, Any]]) -> None:
        """It serves these, and no others."""
        for name in server.models:
            if name not in models and (served := self._models.get(name)) is not None:
                served.layers.local.leave(server.name)
                if not len(served.layers.local) and not len(served.layers.remote):
                    del self._models[name], self._by_number[served.number]
                    served.close()
        server.models = dict(models)
        for name in list(server.models):
            known = self._models.get(name)
            if known is None:
                if len(self._models) >= MODELS_MAX:
                    _log.warning("%s serves %s, and there are %d models already", server.name, name, MODELS_MAX)
                    del server.models[name]
                    continue
                known = self._add(name)
            if known.layers.local.get(server.name) is None:
                self._join(known.layers.local, server)
        self.refresh(server)

    @staticmethod
    def _join(layer: Layer, server: Server) -> None:
        """With an empty cache; whether it gets requests is for :meth:`refresh` to say, and to tell."""
        layer.join(server.name, server.room_for)
        layer.set_live(server.name, False)

    def _add(self, name: str) -> Served:
        self._last_number += 1
        layers = TwoLayers(self._region, self._layer(), self._layer(), self._geography)
        served = Served(name, self._last_number, layers, self._clock, self._wait_s)
        self._models[name] = self._by_number[served.number] = served
        return served

    def _layer(self) -> Layer:
        return Layer(PUSHING_RULES.make(self._pushing), ROUTING_POLICIES.make(self._routing))

    def found(self, server: Server) -> None:
        """It says that it is well."""
        self._breaker.found(server.name)
        if server.gone:
            server.gone = False
            server.pool.drop_idle()
            for name in server.models:
                self._join(self._models[name].layers.local, server)
        if not server.healthy:
            server.healthy = True
            server.lacks = ""
            _log.info("%s serves", server.name)
        self.refresh(server)

    def missing(self, server: Server, why: str, *, gone: bool = False) -> None:
        """It is not well, or nobody is there (``gone``)."""
        server.gone = server.gone or gone
        server.lacks = why
        if server.healthy:
            server.healthy = False
            _log.warning("%s gets no requests: %s", server.name, why)
        self.refresh(server)

    def refresh(self, server: Server) -> None:
        """Whether it gets requests may have changed."""
        now_s = self._clock()
        live = server.healthy and self._breaker.allows(server.name, now_s)
        rests = now_s < server.rests_until_s
        changed = False
        for name in server.models:
            served = self._models[name]
            layer = served.layers.local
            target = layer.get(server.name)
            if target is None:
                continue
            if target.capacity != server.room_for:
                layer.set_capacity(server.name, server.room_for)
                changed = True
            if target.live != live or target.draining != rests:
                layer.set_live(server.name, live)
                layer.set_draining(server.name, rests)
                changed = True
                served.look()
        if changed:
            self._tell()

    def marks(self, server: Server) -> dict[str, int]:
        """By model: what of ours it can know of, now that it is asked."""
        found: dict[str, int] = {}
        for name in server.models:
            target = self._models[name].layers.local.get(server.name)
            if target is not None:
                found[name] = target.sent
        return found

    def report(self, server: Server, report: Report, marks: Mapping[str, int]) -> None:
        """It says so; it was asked when ``marks`` were taken."""
        server.report = report
        now_s = self._clock()
        for name in server.models:
            layer = self._models[name].layers.local
            target = layer.get(server.name)
            if target is not None:
                mark = marks.get(name, 0)
                layer.report(
                    server.name, Report(report.pending, report.running, report.room, min(mark, target.sent)), now_s
                )
        self.refresh(server)
        self._tell()

    # -- a request's way (services.lb.upstreams.exchange.Targets)

    async def exchange(
        self, target: str, head: Outgoing, body: bytes | bytearray, deadline_s: float, first_byte_s: float = inf
    ) -> Answer:
        """The caller sees to the deadline."""
        return await self.servers[target].send(head, body, first_byte_s)

    def sent(self, served: Served, target: str, routed: Routed) -> Target | None:
        self._breaker.tried(target, self._clock())
        server = self.servers[target]
        server.outstanding += 1
        if self._breaker.is_open(target):
            self.refresh(server)  # that was the one request it is tried with
        return served.layers.local.sent(routed, target)

    def ended(self, target: str, sent: Target | None) -> None:
        self.servers[target].outstanding -= 1
        Layer.ended(sent)

    def answered(self, target: str, began_s: float) -> None:
        server = self.servers[target]
        was_open = self._breaker.is_open(target)
        self._breaker.succeeded(target, began_s, self._clock())
        grown = server.kind is None and server.learned.served(server.outstanding)
        if was_open or grown:
            self.refresh(server)

    def failed(self, target: str, *, absent: bool = False) -> None:
        self._breaker.failed(target, self._clock(), absent=absent)
        self.refresh(self.servers[target])

    def refused(self, target: str, rest_s: float) -> None:
        server = self.servers[target]
        if server.kind is None:
            server.learned.refused(server.outstanding)
        if rest_s > 0 and any(each.healthy and each is not server for each in self.servers.values()):
            server.rests_until_s = self._clock() + min(rest_s, REST_MAX_S)
        self.refresh(server)

    def closed(self, server: Server) -> bool:
        """It gets nothing now for what became of earlier requests."""
        return not self._breaker.allows(server.name, self._clock())

    async def wait_news(self, seconds: float) -> None:
        """Until there may be room for more, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _tell(self) -> None:
        self.changed()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        for served in self._models.values():
            served.close()
        for server in self.servers.values():
            server.close()


def _context(said: Mapping[str, Any]) -> float:
    length = said.get("max_model_len")
    return float(length) if type(length) is int else float("inf")


def _nobody() -> None:
    """Nobody is told."""
