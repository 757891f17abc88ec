"""Instances of pinyon as targets: a conductor chooses them, and sessions carry requests there and tokens back.

When the conductor is away, or has lost sight of a model, the load balancer chooses among the last known instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import NotFound, PinyonError, ResourceExhausted, Unavailable
from pinyon.frontdoor.instances.clusters import HOME, Clusters
from pinyon.frontdoor.instances.conductor_session import ConductorAway
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.frontdoor.instances.metrics import LbMetrics
from pinyon.frontdoor.instances.recorder import Recorder
from pinyon.frontdoor.instances.request import RETRY_CODES, Delta, Request, Take
from pinyon.frontdoor.line import Place
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.request_loop import LoopLimits, RequestLoop
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.update_stream import WorkerStream
from pinyon.routing.layer import Layer
from pinyon.routing.routing_keys import keys_of_blocks, routing_root, token_keys
from pinyon.routing.target import Routed
from pinyon.routing.two_layers import RoutedRequest, RoutingChoice, Where
from pinyon.runtime.logging import get_logger

RETRY_AFTER_S: Final = 1.0
ROOTS_MAX: Final = 4096

_log = get_logger("lb")


@dataclass(slots=True, eq=False)
class InstanceKind:
    """The :class:`pinyon.frontdoor.request_loop.TargetKind` of requests for our instances, here or in other regions."""

    clusters: Clusters
    models: ServedModels
    regions: RegionLinks
    metrics: LbMetrics
    limits: LoopLimits
    clock: Clock
    by_routing: bool = False
    """True if instances are chosen here although a conductor answers, which then only lists them."""
    over_http: bool = False
    """True if it places requests for instances with a server, which :class:`HttpInstanceKind` asks."""

    # -- where

    async def place(self, request: Request, choice: RoutingChoice) -> PinyonError | None:
        if choice.where is Where.WAIT and not self.models.serves_here(request.route):
            return Unavailable("No region that may serve this request has room now.", retry_after_s=RETRY_AFTER_S)
        cluster = self.clusters.get(choice.target if choice.where is Where.ADOPTED else HOME)
        layer = cluster.layers(request.model) if self.models.selective else None
        if layer is not None:
            layer.hold()  # a place at its instances, while its conductor chooses one
        try:
            request.placement = await self._placement(request, cluster)
        except (Unavailable, NotFound, ResourceExhausted) as error:
            return error  # waiting does not help against any other error
        finally:
            if layer is not None:
                layer.release()
        request.choice, request.placed_by = choice, cluster
        return None

    async def _placement(self, request: Request, cluster: ConductorCluster) -> common_pb2.Placement:
        """Returns a placement. Raises :class:`ResourceExhausted` for a rejection, and :class:`Unavailable`."""
        exclude = self._excluded(request, cluster)
        model = request.model
        if not self.by_routing:
            try:
                keys = None if cluster.keys_fit(self.clusters.home, model) else b""
                asked = request.schedule_message(exclude, keys)
                return await cluster.conductor.place(asked, request.schedule_bytes(exclude))
            except (Unavailable, NotFound) as refusal:  # ConductorAway among them
                # The model is ours, so the conductor knows no instance of it, or none yet.
                if not isinstance(refusal, ConductorAway) and not cluster.doubts(model):
                    raise
        wanted, routed, careful = request.tokens_wanted, request.route.routed, request.tries > 0
        placement = cluster.choose(model, wanted, exclude, self.clock(), routed, careful=careful)
        if not self.by_routing:
            self.metrics.fallbacks.add()
        return placement

    def _excluded(self, request: Request, cluster: ConductorCluster) -> set[str]:
        """Returns the instances that failed this request, were removed, or may not continue its tokens. If then none is
        left, and the client has seen nothing, the request starts over."""
        excluded = request.failed_instances | cluster.removed
        if not self.over_http:
            excluded |= cluster.over_http(request.model)
        if not (request.tokens and request.fingerprint):
            return excluded
        model = request.model
        exclude = excluded | cluster.with_other_weights(model, request.fingerprint)
        if len(exclude) == len(excluded):
            return exclude
        if request.whole and not cluster.servable(model, self.clock(), request.tokens_wanted, exclude):
            _log.warning(
                "nobody else has the weights that generated: from the start",
                extra={"request_id": request.name, "generated": len(request.tokens)},
            )
            request.start_over()
            return excluded
        return exclude

    def queues(self, request: Request) -> bool:
        """Returns False after a failed attempt: the request goes ahead of others, as its client has waited."""
        return not request.exclude

    # -- an attempt

    async def attempt(self, request: Request) -> None:
        if request.choice.where is Where.REMOTE:
            await self._elsewhere(request, request.choice.target)
            return
        placement, cluster = request.placement, request.placed_by
        assert placement is not None
        assert cluster is not None
        attempt_id, placed_s = request.attempt_id, self.clock()
        request.begin_attempt(placed_s)
        counted = cluster.begin(request.model, placement, request.route.routed)
        try:
            await self._on_instance(request, placement, cluster, attempt_id)
        finally:
            cluster.end(counted)
            self.models.tell()
            if request.finish_reason is not None:
                cluster.failures.succeeded(placement.decode_instance_id, placed_s)
            else:
                # An instance that still lives reports the end itself; a dead one cannot.
                cluster.conductor.release(attempt_id)

    async def _on_instance(
        self, request: Request, placement: common_pb2.Placement, cluster: ConductorCluster, attempt_id: str
    ) -> None:
        model, decode, placed_s = request.model, placement.decode_instance_id, self.clock()
        size_bytes = request.size_bytes + 4 * len(request.tokens) + placement.ByteSize()
        try:
            opened = await self.clusters.workers.open(placement.decode_address, decode, size_bytes, request.gap_s)
        except Unavailable as error:
            request.error = error
            return
        stream = opened[0]
        try:
            keys_fit = cluster.keys_fit(self.clusters.home, model, decode)
            request.fill(opened[1], attempt_id, keys_fit, cluster.fingerprint(model, decode), self.clock())
            del opened  # a part of a message keeps the whole message alive
            await self._receive(
                request, stream, lambda: cluster.failures.succeeded(placement.prefill_instance_id, placed_s)
            )
        finally:
            request.reached, request.lost = stream.reached, stream.lost
            stream.close()

    async def _elsewhere(self, request: Request, name: str) -> None:
        """Runs the attempt in another region, whose load balancer places it."""
        regions, attempt_id = self.regions, request.attempt_id
        sent_s = self.clock()
        request.begin_attempt(sent_s, name, regions.region_of(name))
        try:
            talk = regions.talk(name)
        except Unavailable as error:
            request.error = error
            self.models.tell()
            return
        stream, submission = talk.open(request.gap_s)
        counted = self.models.sent(request.served, request.route.routed, name)
        try:
            request.fill(submission, attempt_id, False, "", self.clock())
            talk.send(submission, request.gap_s)
            del submission
            self.metrics.forwarded.add((request.region,))
            await self._receive(request, stream, lambda: self.models.accepted(name, sent_s))
        finally:
            Layer.ended(counted)
            self.models.tell()
            request.reached, request.lost = stream.reached, stream.lost
            stream.close()

    async def _receive(self, request: Request, stream: WorkerStream, begun: Callable[[], None]) -> None:
        """Receives the updates of an attempt, to its end. ``begun`` is called at the first token, or at the end."""
        clock, take, waits = self.clock, request.take, True
        assert take is not None
        while request.finish_reason is None and request.error is None:
            delta = _fold(request, await stream.take(), clock())
            if waits and (delta.tokens or request.finish_reason is not None):
                waits = False
                begun()
            if not delta.tokens and not delta.text:
                continue
            if request.whole:
                request.hold(delta)
                continue
            if (doing := take(delta)) is not None:
                await doing
            if request.listener is not None and stream.listener is None:
                # From here on, text goes to the listener straight from the socket. The end, and text that the listener
                # does not take, comes this way.
                stream.listener = partial(request.pass_on, clock)

    # -- after a failed attempt

    def retries(self, request: Request) -> PinyonError | None:
        error = request.error
        assert error is not None
        now_s, leaving = self.clock(), False
        cluster = request.placed_by
        if cluster is not None and not request.lb and (failed := request.failed_instance) is not None:
            leaving = cluster.leaves(failed)
            if not request.found_full:
                cluster.failures.failed(failed, now_s)
        if not request.retry(self.limits.attempts, self.limits.wait_s, now_s, leaving=leaving):
            if error.grpc_code not in RETRY_CODES or request.refused:
                return error
            # Whatever code the instance used, the client may try again.
            return Unavailable(error.message, retry_after_s=error.retry_after_s or RETRY_AFTER_S)
        _log.warning(
            "attempt %d failed: %s", request.tries, error.message,
            extra={"request_id": request.name, "generated": len(request.tokens)},
        )  # fmt: skip
        request.full = error if request.found_full else None
        if request.refused:
            self.models.refused(request.model, request.lb)
        return None

    def gives_up(self, request: Request) -> bool:
        return False

    def nobody(self, request: Request, error: PinyonError) -> PinyonError:
        home = self.clusters.home
        if request.tokens and home.with_other_weights(request.model, request.fingerprint):
            return Unavailable(
                "The instance that generated went away, and no other one serves the weights it began with.",
                retry_after_s=RETRY_AFTER_S,
            )
        message = "No instance is available for this model." if isinstance(error, NotFound) else error.message
        return Unavailable(message, retry_after_s=error.retry_after_s or RETRY_AFTER_S)

    async def wait_change(self, request: Request, timeout_s: float) -> None:
        """Waits for the next list of the region's own cluster, at most ``timeout_s``.

        Drops exclusions, as instances may have restarted under their old names. An instance that failed lately stays
        excluded without news of it: its address may still be dead, and attempts are few. So does a load balancer that
        is still away."""
        await self.clusters.home.wait_change(timeout_s)
        failed = request.exclude
        if failed:
            bad = self.models.still_away(failed)
            for cluster in self.clusters:
                bad.update(cluster.failures.avoided(self.clock()))
            failed &= bad


def _fold(request: Request, updates: list[worker_pb2.StreamUpdate], now_s: float) -> Delta:
    if len(updates) == 1:
        return request.fold(updates[0], now_s)
    texts: list[str] = []
    tokens: list[int] = []
    logprobs = common_pb2.Logprobs()
    for update in updates:
        delta = request.fold(update, now_s)
        texts.append(delta.text)
        tokens += delta.tokens
        logprobs.MergeFrom(delta.logprobs)
    return Delta("".join(texts), tokens, logprobs)


def routed(request: Request, models: ServedModels, secret: bytes) -> Routed:
    """Returns what the target of a request is chosen by: keys of its prompt, starting from the cluster's ``secret``,
    and its session or user. It must be cheap, as it is recorded for every request, whatever chooses the target."""
    whose = request.request_class
    if not models.selective and request.block_keys:
        # Where a conductor chooses and there are no other regions, the block keys made for it are good enough.
        keys = keys_of_blocks(request.block_keys)
    else:
        keys = token_keys(_root(request.model, whose.tenant, secret, whose.cache_salt), request.tokens_le32)
    key = whose.session or whose.user
    return Routed(keys, f"{whose.tenant}/{key}" if key else "")


@lru_cache(maxsize=ROOTS_MAX)
def _root(model: str, tenant: str, secret: bytes, cache_salt: str) -> bytes:
    return routing_root(model, tenant, secret, cache_salt)


class Dispatcher:
    """The dispatcher of a load balancer. Every request runs in the task that calls :meth:`run`."""

    def __init__(self, loop: RequestLoop[Request], models: ServedModels, secret: bytes, recorder: Recorder) -> None:
        self._loop = loop
        self._models, self._secret = models, secret
        self._recorder = recorder

    async def run(self, request: Request, ticket: Place | None, take: Take) -> None:
        """Runs the request until it has its ``finish_reason``. ``take`` gets its news; for a whole answer, all at once.

        Raises the :class:`PinyonError` it failed with, and what ``take`` raises. However it ends, even if cancelled,
        its ticket is left and no hop keeps anything of it."""
        target, whose = routed(request, self._models, self._secret), request.request_class
        request.depart(self._models.of(request.model), target, whose.geographies, whose.tenant)
        request.take = take
        try:
            await self._loop.run(request, ticket)
        finally:
            request.take = request.listener = None
            self._recorder.ended(request)
        if request.whole and (doing := take(request.held())) is not None:
            await doing

    def demand(self, request: Request) -> int:
        """Returns the demand of the request: the number of the set of targets that it waits for in the queue."""
        # The keys of its prompt say nothing about that: they are made when it runs.
        whose = request.request_class
        route = RoutedRequest(Routed(), whose.geographies, whose.tenant, request.sender, request.exclude)
        return self._models.demand(self._models.of(request.model), route)
