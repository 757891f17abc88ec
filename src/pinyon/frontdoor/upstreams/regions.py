"""Other regions as targets: their load balancers, each of which serves what it gets on the servers of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from math import inf

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Absent, Broke
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.upstreams.exchange import Outgoing
from pinyon.frontdoor.upstreams.reading import MODEL_CHARS_MAX
from pinyon.frontdoor.upstreams.served import Served
from pinyon.frontdoor.upstreams.served_models import ServedModels
from pinyon.messages.request_class import class_to_proto
from pinyon.routing.layer import Layer
from pinyon.routing.refusals import Refusals
from pinyon.routing.target import Report, Target
from pinyon.routing.target_policy import Routed
from pinyon.routing.under_way import UnderWay

__all__ = ["RegionTargets"]


class RegionTargets:
    """The ``REMOTE`` :class:`pinyon.frontdoor.upstreams.exchange.Targets`; ``links`` tells it what it hears."""

    def __init__(self, models: ServedModels, metrics: DoorMetrics, clock: Clock, *, signed: bool) -> None:
        """``signed``: there is a secret, so the hash of a body is worth making."""
        self.links: RegionLinks
        self._models = models
        self._metrics = metrics
        self._clock = clock
        self._signs = signed
        self._listed: dict[str, set[str]] = {}
        """Models that each load balancer serves."""
        self._under_way = UnderWay()
        self._refusals = Refusals()

    # -- what is heard of them (pinyon.frontdoor.regions.links.Hears)

    def heard(self, name: str, region: str, models: Mapping[str, Report], distance_s: float, *, draining: bool) -> None:
        """It serves these, and no others."""
        now_s = self._clock()
        listed = self._listed.setdefault(name, set())
        unseen = self._under_way.told(name, max([report.received for report in models.values()], default=0))
        for model in listed - models.keys():
            listed.discard(model)
            self._leave(model, name)
        for model, report in models.items():
            served = self._models.add(model) if 0 < len(model) <= MODEL_CHARS_MAX else None
            if served is None:
                continue
            listed.add(model)
            remote = served.layers.remote
            known = remote.get(name)
            if known is None or known.region != region:
                remote.join(name, region=region)
            remote.set_live(name, True)
            remote.set_draining(name, draining)
            remote.set_distance(name, distance_s)
            remote.report(name, self._refusals.believed(name, report, now_s), now_s, unseen.get(model, 0))
            served.look()
        self._models.tell()

    def expect(self, name: str, region: str) -> None:
        """It is one of ours, and has not been heard yet."""
        self._models.know({**self._models.others, name: region})

    def away(self, name: str) -> None:
        """It does not answer. Its servers may have what they were sent before all the same, when it is back."""
        self._under_way.forget(name)
        for model in self._listed.get(name, ()):
            served = self._models.by_name[model]
            served.layers.remote.set_live(name, False)
            served.layers.remote.begin_session(name)
            served.look()
        self._models.tell()

    def gone(self, name: str) -> None:
        """It is no load balancer of ours any more."""
        self._refusals.gone(name)
        self._models.know({other: region for other, region in self._models.others.items() if other != name})
        self._under_way.forget(name)
        for model in self._listed.pop(name, set()):
            self._leave(model, name)
        self._models.tell()

    def _leave(self, model: str, name: str) -> None:
        served = self._models.by_name[model]
        served.layers.remote.leave(name)
        served.look()
        self._models.drop_unserved(model)

    # -- a request's way (pinyon.frontdoor.upstreams.exchange.Targets)

    async def exchange(
        self, target: str, head: Outgoing, body: bytes | bytearray, deadline_s: float, first_byte_s: float = inf
    ) -> Answer:
        message = peer_pb2.RawHead(
            request_id=head.request_id,
            target=head.target,
            fields=head.fields,
            body_length=len(body),
            body_sha256=sha256(body).digest() if self._signs else b"",
            model=head.model,
            timeout_ms=max(1, round((deadline_s - self._clock()) * 1e3)),
        )
        if head.whose is not None:
            message.request_class.CopyFrom(class_to_proto(head.whose))
        try:
            answer = self.links.ask(target, message, body)
        except Unavailable as away:
            raise Absent(away.message, retry_after_s=away.retry_after_s) from None
        self._under_way.sent(target, head.model)
        self._metrics.forwarded(self.links.region_of(target))
        try:
            async with asyncio.timeout(first_byte_s if first_byte_s < inf else None):
                await answer.head()
        except BaseException as error:
            answer.close()
            if isinstance(error, TimeoutError):
                raise Broke("The other region did not answer in time.", begun=False) from None
            raise
        return answer

    def sent(self, served: Served, target: str, routed: Routed) -> Target | None:
        return served.layers.remote.sent(routed, target)

    def ended(self, target: str, sent: Target | None) -> None:
        Layer.ended(sent)
        self._models.tell()

    def answered(self, target: str, began_s: float) -> None:
        """It serves what was sent there then; how it is it says itself."""
        self._refusals.accepted(target, began_s)

    def failed(self, target: str, *, absent: bool = False) -> None:
        """Nothing follows: what its servers do is its own load balancer's business, and the session's end is heard."""

    def refused(self, target: str, rest_s: float) -> None:
        """It has room for nobody until it says so again, and is believed again."""
        self._refusals.refused(target, self._clock())
        for model in self._listed.get(target, ()):
            remote = self._models.by_name[model].layers.remote
            known = remote.get(target)
            if known is not None:
                remote.report(target, replace(known.report, available=0), known.reported_s)
