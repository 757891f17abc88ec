"""Instances with an OpenAI-compatible server as targets: placed like pinyon's own, and asked by HTTP exchanges."""

from __future__ import annotations

from typing import ClassVar, Final

from pydantic_core import from_json

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument, PinyonError, Unavailable
from pinyon.core.layout import UNKNOWN_PACKING
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Absent, Broke, Refused
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.frontdoor.instances.kind import InstanceKind
from pinyon.frontdoor.instances.request import Request
from pinyon.frontdoor.request_loop import LoopLimits
from pinyon.frontdoor.servers.body import clean_answer, with_additions
from pinyon.frontdoor.servers.instance_servers import InstanceServer, InstanceServers
from pinyon.frontdoor.servers.prefill import compute_prompt, whole
from pinyon.frontdoor.servers.request import ServerRequest
from pinyon.frontdoor.servers.so_far import ASK, HELD_BYTES_MAX, StreamSoFar
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.frontdoor.upstreams.kind import NO_ROOM, ExchangeKind, Targets
from pinyon.frontdoor.upstreams.passing import Passing
from pinyon.messages.plan import PLAN_CHARS_MAX, seal_plan
from pinyon.routing.target import Target
from pinyon.routing.two_layers import RoutingChoice, Where
from pinyon.runtime.logging import get_logger

Counted = tuple[Target | None, Target | None]
_log = get_logger("lb.servers")
DETOKENIZE_S: Final = 5.0
_GONE: Final = "No instance of this model is there any more."


class HttpInstanceKind(ExchangeKind):
    """The :class:`pinyon.frontdoor.request_loop.TargetKind` of requests for instances with a server. Where they go is
    decided ``by_keys``, by a conductor if there is one, or else ``by_text``, here. Plans are sealed with ``secret``."""

    elsewhere: ClassVar[frozenset[int]] = NO_ROOM | {500}
    """A server whose engine has ended says 500 until it ends, too."""

    def __init__(
        self,
        by_keys: InstanceKind,
        by_text: InstanceKind,
        servers: InstanceServers,
        secret: bytes,
        limits: LoopLimits,
        first_byte_s: float,
        clock: Clock,
    ) -> None:
        super().__init__(by_keys.models, limits, first_byte_s, clock)
        self._by_keys, self._by_text, self.servers, self.secret = by_keys, by_text, servers, secret

    async def place(self, forward: Forward, choice: RoutingChoice) -> PinyonError | None:
        assert isinstance(forward, ServerRequest)
        asks = forward.asks
        asks.tries = forward.tries
        self._exclude(forward, choice)
        try:
            error = await (self._by_keys if forward.keyed else self._by_text).place(asks, choice)
        except InvalidArgument:  # it fits nowhere, as far as we know: the server says so, or knows better
            error = await self._by_text.place(asks, choice)
        if error is not None:
            return error
        placement, cluster = asks.placement, asks.placed_by
        if placement is None or cluster is None or self.servers.get(placement.decode_instance_id) is None:
            if placement is not None and cluster is not None:  # it went while the conductor was asked
                cluster.conductor.release(asks.attempt_id)
                forward.exclude.add(placement.decode_instance_id)
            return Unavailable(_GONE, retry_after_s=1.0)
        forward.choice = RoutingChoice(choice.where, placement.decode_instance_id)
        return None

    def _exclude(self, forward: ServerRequest, choice: RoutingChoice) -> None:
        """Excludes the instances that failed the request, have no server that may be asked, or lack its adapter; and,
        while there are others, those that failed another one lately."""
        model = forward.asks.model
        clusters, now_s = self._by_keys.clusters, self.clock()
        cluster = clusters.get(choice.target) if choice.where is Where.ADOPTED else clusters.home
        for name, known in list(forward.failed_at.items()):
            if self.servers.get(name) not in (known, None):  # it has started again
                forward.exclude.discard(name)
                del forward.failed_at[name]
        exclude = forward.exclude.union([name for name in cluster.over_http(model) if self.servers.get(name) is None])
        if forward.adapter:
            exclude |= self.servers.lacking(model, forward.adapter)
        if lately := cluster.failures.avoided(now_s):
            avoided = exclude.union(lately)
            exclude = avoided if cluster.servable(model, now_s, 1, avoided) else exclude
        forward.asks.exclude = exclude

    def queues(self, forward: Forward) -> bool:
        return not forward.exclude

    def targets(self, forward: Forward) -> Targets:
        assert isinstance(forward, ServerRequest)
        asks, known = forward.asks, self.servers.get(forward.choice.target)
        if forward.choice.where is Where.REMOTE or known is None or asks.placement is None or asks.placed_by is None:
            raise Unavailable(_GONE, retry_after_s=1.0)  # no other region is asked over HTTP
        return _Attempt(self, asks, asks.placement, asks.placed_by, known)

    def passing(self, forward: Forward, answer: Answer) -> Passing:
        assert isinstance(forward, ServerRequest)
        so_far, before, reply = forward.so_far, forward.passing, forward.reply
        passing = Passing(answer, reply, forward.ticket.rate_fields, self.clock)
        # It must not hold the request, which holds it: such a cycle would wait for the garbage collector.
        passing.clean = lambda data: _not_given_up(clean_answer(data), reply.begun)
        if so_far is not None and so_far.asked and passing.is_stream:
            passing.clean = lambda data: so_far.passed(clean_answer(data))
            passing.held_max = HELD_BYTES_MAX
        if reply.begun and before is not None:
            if answer.status != 200 or not passing.is_stream:
                said = f"The server answered {answer.status} and would not go on with the stream."
                raise Broke(said, begun=False, its_fault=False)
            passing.first_s, passing.events = before.first_s, before.events
        return passing

    async def attempt(self, forward: Forward) -> None:
        assert isinstance(forward, ServerRequest)
        name, so_far = forward.choice.target, forward.so_far
        known, had = self.servers.get(name), 0 if so_far is None else so_far.made
        await super().attempt(forward)
        if forward.error is not None:
            if so_far is not None and so_far.made > had:  # what other servers did before it says nothing any more
                forward.exclude.clear()
                forward.full = None
            forward.exclude.add(name)
            forward.failed_at[name] = known
            if isinstance(forward.error, Refused) and forward.error.status == 500:
                forward.paid += 1  # the request may be to blame: it gets one more server, not all of them
            if so_far is not None and so_far.can_go_on:
                forward.final = False
                forward.asks.tokens = so_far.tokens or forward.asks.tokens  # only the same weights may go on
            elif so_far is not None and forward.reply.begun and (ending := so_far.ending()) is not None:
                await forward.reply.end(ending)
                forward.error, forward.status = None, 200
            elif not forward.reply.begun:  # the client has nothing of the answer
                forward.final = False

    def gives_up(self, forward: Forward) -> bool:
        """Returns False for a stream that may go on: a server of it may come back soon."""
        return not forward.reply.begun and super().gives_up(forward)

    def nobody(self, forward: Forward, error: PinyonError) -> PinyonError:
        assert isinstance(forward, ServerRequest)
        return forward.error or self._by_keys.nobody(forward.asks, error)

    async def wait_change(self, forward: Forward, timeout_s: float) -> None:
        """Keeps all exclusions, as for other servers."""
        await self._by_keys.clusters.home.wait_change(timeout_s)


def _not_given_up(data: bytes, begun: bool) -> bytes:
    """Returns the same part of an answer. Raises :class:`Broke` if it says that the server ends before the answer: it
    cannot be a part of the text, where quotes are escaped."""
    at = data.find(b'"finish_reason":"abort"')
    if at >= 0:
        error = Broke("The server gave the answer up.", begun=begun)
        error.before = data[: max(0, data.rfind(b"\n\n", 0, at) + 2)] if begun else b""
        raise error
    return data


class _Attempt:
    """The target of one attempt, at the instance that was placed; see :class:`Targets`."""

    def __init__(
        self,
        kind: HttpInstanceKind,
        asks: Request,
        placement: common_pb2.Placement,
        cluster: ConductorCluster,
        known: InstanceServer,
    ) -> None:
        self._kind, self._asks, self._placement, self._cluster, self._known = kind, asks, placement, cluster, known
        self._forward: Forward | None = None

    def sent(self, target: str, forward: Forward) -> Counted:
        self._known.server.outstanding += 1
        return self._cluster.begin(self._asks.model, self._placement, forward.route.routed)

    async def exchange(self, target: str, forward: Forward, first_byte_s: float) -> Answer:
        assert isinstance(forward, ServerRequest)
        placement, server = self._placement, self._known.server
        url, body, prefill_ms, so_far, asks = forward.url, forward.body, 0, forward.so_far, self._asks
        if placement.prefill_instance_id != placement.decode_instance_id:
            placement, prefill_ms = await self._computed_elsewhere(forward)
        apart = placement.prefill_instance_id != placement.decode_instance_id
        part = worker_pb2.PLAN_PART_DECODE if apart else worker_pb2.PLAN_PART_UNSPECIFIED
        plan = self._plan(forward, self._known, placement, prefill_ms, part)
        more: tuple[bytes, ...] = ()
        if so_far is not None and (plan or so_far.begun):  # a server with a connector, so it is vLLM
            more, so_far.asked = () if so_far.shows_tokens else (ASK,), True
            if not asks.tokens:
                asks.fingerprint = self._known.info.model_fingerprint
            if so_far.begun:
                if so_far.chat:
                    so_far.answered(await self._text_of_tokens(so_far, forward))
                url, changed = so_far.request()
                if changed is not None:
                    body, more = changed, (ASK,)
        answer = await server.send(url, forward.fields, with_additions(body, plan, forward.salt, *more), first_byte_s)
        self._known.answers[forward], self._forward = answer, forward
        return answer

    async def _text_of_tokens(self, so_far: StreamSoFar, forward: ServerRequest) -> str:
        """Returns what the server says is the text of the tokens so far; empty if it does not say."""
        question = so_far.question(forward.asked.model)
        try:
            server = self._known.server  # not by its few connections for probes: many streams may ask at once
            status, said = await server.ask(b"/detokenize", DETOKENIZE_S, HELD_BYTES_MAX, question, server.pool)
            return str(from_json(said)["prompt"]) if status == 200 else ""
        except (Unavailable, ValueError, KeyError, TypeError):
            return ""

    async def _computed_elsewhere(self, forward: ServerRequest) -> tuple[common_pb2.Placement, int]:
        """Has the prompt computed by the prefill instance. Returns the placement for the decode instance, and the
        milliseconds that it took; if it fails, that of a request which is computed where it decodes."""
        kind, placement = self._kind, self._placement
        name, began_s = placement.prefill_instance_id, kind.clock()
        known, plan = kind.servers.get(name), ""
        if known is not None and forward.keyed and not self._asks.terms.no_reuse:
            plan = self._plan(forward, known, placement, part=worker_pb2.PLAN_PART_PREFILL)
        if known is None or not plan:
            return whole(placement), 0
        try:
            await compute_prompt(known, forward, plan, kind.first_byte_s)
        except Unavailable as error:
            _log.warning("%s computed no prompt: %s", name, error.message, extra={"request_id": forward.name})
            if isinstance(error, Absent | Broke):
                self.failed(name)
            return whole(placement), round((kind.clock() - began_s) * 1e3)
        self.answered(name, began_s)
        found = common_pb2.Placement()
        found.CopyFrom(placement)
        found.ClearField("fetches")
        if known.info.keeps_to_itself:
            found.prefill_address = ""  # the store has it, or nobody
        return found, round((kind.clock() - began_s) * 1e3)

    def _plan(
        self,
        forward: ServerRequest,
        known: InstanceServer,
        placement: common_pb2.Placement,
        prefill_ms: int = 0,
        part: worker_pb2.PlanPart = worker_pb2.PLAN_PART_UNSPECIFIED,
    ) -> str:
        layout = known.info.layout
        if not forward.planned or layout is None or layout.packing == UNKNOWN_PACKING:
            return ""
        asks = self._asks
        plan = worker_pb2.Plan(
            request_id=asks.attempt_id,
            request_class=asks.class_message,
            placement=placement,
            no_reuse=asks.terms.no_reuse,
            traceparent=forward.traceparent,
            prefill_ms=prefill_ms,
            part=part,
        )
        sealed = seal_plan(plan.SerializeToString(), self._kind.secret)
        return sealed if len(sealed) <= PLAN_CHARS_MAX else ""

    def answered(self, target: str, began_s: float) -> None:
        self._cluster.failures.succeeded(target, began_s)

    def failed(self, target: str, *, absent: bool = False) -> None:
        self._cluster.failures.failed(target, self._kind.clock())

    def refused(self, model: str, target: str, rest_s: float) -> None:
        """Does nothing: the request goes elsewhere, and the conductor knows by reports how busy the instance is."""

    def ended(self, target: str, sent: Counted) -> None:
        """Ends the attempt everywhere, at the conductor too: not every instance reports that."""
        self._cluster.end(sent)
        if self._forward is not None:
            self._known.answers.pop(self._forward, None)
        self._known.ended()
        self._cluster.conductor.release(self._asks.attempt_id)
        self._kind.models.tell()
