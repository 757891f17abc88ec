"""Takes requests through their life: queue, placement, submission, updates; again elsewhere when an instance fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from functools import partial

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument, NotFound, PinyonError, ResourceExhausted, Unavailable
from pinyon.frontdoor.admission import Turn
from pinyon.frontdoor.instances.clusters import HOME, Cluster, Clusters
from pinyon.frontdoor.instances.conductor_session import ConductorAway
from pinyon.frontdoor.instances.metrics import LbMetrics
from pinyon.frontdoor.instances.recorder import Recorder
from pinyon.frontdoor.instances.request import NOTHING, RETRY_CODES, Delta, Request
from pinyon.frontdoor.instances.routing import Routing
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.seekers import Seekers
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.update_stream import WorkerStream
from pinyon.routing.layer import Layer
from pinyon.routing.two_layers import Where
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Telemetry

__all__ = ["Dispatcher", "Take"]

Take = Callable[[Delta], Awaitable[None] | None]
"""Is handed what is new for a client, in the request's task. While the client is behind it says what to await."""

RETRY_AFTER_S = 1.0
POLL_S = 0.5
"""An instance may become placeable without a change of the list (its load fell)."""

_FINE = PinyonError("")

_log = get_logger("lb")


class Dispatcher:
    """One per load balancer. Every request runs in the task that calls :meth:`run`."""

    def __init__(
        self,
        clusters: Clusters,
        workers: WorkerSessions,
        models: ServedModels,
        routing: Routing,
        regions: RegionLinks,
        metrics: LbMetrics,
        recorder: Recorder,
        telemetry: Telemetry,
        clock: Clock,
        attempts: int,
        placement_wait_s: float,
        by_routing: bool = False,
        slots: int = 1024,
    ) -> None:
        """``by_routing``: instances are chosen here although a conductor answers, which only says who is there.
        ``slots`` are the queue's."""
        self._clusters = clusters
        self._workers = workers
        self._models = models
        self._routing = routing
        self._regions = regions
        self._metrics = metrics
        self._recorder = recorder
        self._telemetry = telemetry
        self._clock = clock
        self._attempts = attempts
        self._placement_wait_s = placement_wait_s
        self._by_routing = by_routing
        self._seekers = Seekers(slots)

    async def run(self, request: Request, ticket: Turn, take: Take) -> None:
        """Until the request has its ``finish_reason``, ``take`` what is new for the client; of a whole one all at once.

        Raises the :class:`PinyonError` it failed with, and what ``take`` does. The caller leaves the ticket; wherever
        it ends, also by cancelling, nothing of the request is left on any hop.
        """
        ask = request.ask
        outcome = "cancelled"
        with self._telemetry.span("lb.request", ask.traceparent, request_id=ask.request_id) as span:
            span.classify(ask.request_class)
            request.traceparent = span.traceparent or ask.traceparent
            self._metrics.began(request)
            try:
                await ticket.turn(request.total_tokens, priority=self.priority(request), demand=self.demand(request))
                while not request.finished:
                    ticket.release()  # in this turn of the loop it is chosen for itself, or held again
                    where = await self._place(request, ticket)
                    if isinstance(where, str):
                        await self._elsewhere(request, where, take)
                    else:
                        await self._attempt(request, where[0], where[1], take)
                    if not request.finished:
                        self._retry_or_raise(request)
                        if request.refused:
                            self._models.refused(ask.model, request.lb)
                            await ticket.again(self.demand(request))
                reason = request.finish_reason
                assert reason is not None
                outcome = reason.value
                ticket.leave(request.used_tokens)
                if request.whole and (doing := take(request.held())) is not None:
                    await doing
            except PinyonError as error:
                outcome = error.grpc_code.lower()
                raise
            finally:
                ticket.leave(request.used_tokens)
                now_s = self._clock()
                if outcome == "cancelled" and now_s >= request.deadline_s:
                    outcome = "deadline_exceeded"
                span.set("outcome", outcome)
                self._metrics.ended(request, outcome, now_s)
                self._recorder.ended(request)

    def demand(self, request: Request) -> int:
        """The number of what it may go to, which it waits for in the queue."""
        if request.routed is NOTHING:
            request.routed = self._routing.routed(request.ask)
        return self._models.demand(self._models.of(request.ask.model), request.route)

    @staticmethod
    def priority(request: Request) -> int:
        """Lower goes first, of one tenant's."""
        return request.ask.request_class.priority

    async def _attempt(self, request: Request, placement: common_pb2.Placement, cluster: Cluster, take: Take) -> None:
        """One instance's part. Afterwards the request has a ``finish_reason`` or an ``error``."""
        view, attempt_id = cluster.view, request.attempt_id
        placed_s = self._clock()
        request.begin_attempt(placement, placed_s)
        request.cluster = cluster.name
        counted = view.begin(request.ask.model, placement, request.routed)
        try:
            await self._on_instance(request, placement, cluster, attempt_id, placed_s, take)
        finally:
            view.end(counted)
            self._models.tell()
            if request.finished:
                view.succeeded(placement.decode_instance_id, placed_s)
            else:
                # Whoever still lives reports the end itself; who does not cannot.
                cluster.conductor.release(attempt_id)

    async def _on_instance(
        self,
        request: Request,
        placement: common_pb2.Placement,
        cluster: Cluster,
        attempt_id: str,
        placed_s: float,
        take: Take,
    ) -> None:
        view, model, decode = cluster.view, request.ask.model, placement.decode_instance_id
        size_bytes = request.ask.size_bytes + 4 * len(request.tokens) + placement.ByteSize()
        try:
            opened = await self._workers.open(placement.decode_address, size_bytes, request.gap_s, decode)
        except Unavailable as error:
            request.error = error
            return
        stream = opened[0]
        try:
            keys_fit = self._keys_are(cluster, model) and view.keys_fit(model, decode)
            request.fill(opened[1], attempt_id, keys_fit, view.fingerprint(model, decode), self._clock())
            del opened  # a part of a message keeps all of it
            await self._receive(request, stream, take, lambda: view.succeeded(placement.prefill_instance_id, placed_s))
        finally:
            request.reached, request.lost = stream.reached, stream.lost
            stream.close()

    async def _elsewhere(self, request: Request, name: str, take: Take) -> None:
        """Another region's part, which its load balancer sees to. Afterwards as after :meth:`_attempt`."""
        regions, attempt_id = self._regions, request.attempt_id
        sent_s = self._clock()
        request.begin_attempt(None, sent_s, name, regions.region_of(name))
        try:
            opened = regions.open(name, request.gap_s)
        except Unavailable as error:
            request.error = error
            self._models.tell()
            return
        stream = opened[0]
        counted = self._models.sent(self._models.of(request.ask.model), request.routed, name)
        try:
            request.fill(opened[1], attempt_id, False, "", self._clock())
            regions.send(name, stream, opened[1], request.gap_s)
            self._metrics.forwarded(regions.region_of(name))
            del opened
            await self._receive(request, stream, take, lambda: self._models.accepted(name, sent_s))
        finally:
            Layer.ended(counted)
            self._models.tell()
            request.reached, request.lost = stream.reached, stream.lost
            stream.close()

    async def _receive(self, request: Request, stream: WorkerStream, take: Take, begun: Callable[[], None]) -> None:
        """The updates of an attempt, to its end. ``begun`` is called when there is a token, or the end."""
        clock = self._clock
        waits = True
        while not request.over:
            delta = _fold(request, await stream.take(), clock())
            if waits and (delta.tokens or request.finished):
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
                # From here on text goes to who listens right where it is read; the end, and what is not taken, comes
                # this way.
                stream.listener = partial(request.pass_on, clock)

    def _retry_or_raise(self, request: Request) -> None:
        error = request.error
        assert error is not None
        now_s, leaving = self._clock(), False
        if not request.lb and (failed := request.failed_instance) is not None:
            view = self._clusters.get(request.cluster).view
            leaving = view.leaves(failed)
            if not request.found_full:
                view.failed(failed, now_s)
        if not request.retry(self._attempts, self._placement_wait_s, now_s, leaving=leaving):
            if error.grpc_code not in RETRY_CODES or request.refused:
                raise error
            # Whatever the instance called it, the client may try again.
            raise Unavailable(error.message, retry_after_s=error.retry_after_s or RETRY_AFTER_S)
        _log.warning(
            "attempt %d failed: %s", request.attempt, error.message,
            extra={"request_id": request.ask.request_id, "generated": len(request.tokens)},
        )  # fmt: skip
        self._metrics.retries.add()
        if request.tokens:
            self._metrics.resumes.add()

    async def _place(self, request: Request, ticket: Turn) -> tuple[common_pb2.Placement, Cluster] | str:
        """Where the next attempt runs: on which instances of which cluster here, or the name of another region's load
        balancer. Waits a while for an instance if there is none."""
        seeking: list[ExitStack] = []
        try:
            return await self._find(request, ticket, seeking)
        finally:
            for each in seeking:
                each.close()

    async def _find(
        self, request: Request, ticket: Turn, seeking: list[ExitStack]
    ) -> tuple[common_pb2.Placement, Cluster] | str:
        give_up_s = self._clock() + self._placement_wait_s
        while True:
            choice = self._models.choose(self._models.of(request.ask.model), request.route)
            if choice.where is Where.REMOTE:
                return choice.target
            if choice.where is Where.NOWHERE:
                raise InvalidArgument(self._forbidden(request), field="geographies")
            if choice.where is Where.WAIT and self._waits(request) and await ticket.again(self.demand(request)):
                ticket.release()  # somebody else was quicker
                give_up_s = self._clock() + self._placement_wait_s
                continue
            if choice.where in (Where.LOCAL, Where.ADOPTED) or self._models.serves_here(request.route):
                cluster = self._clusters.get(choice.target if choice.where is Where.ADOPTED else HOME)
                held = self._models.hold_here(request.ask.model, cluster.name)
                try:
                    placement, error = await self._here(request, cluster)
                finally:
                    if held is not None:
                        held.release()
                if placement is not None:
                    return placement, cluster
            else:
                error = Unavailable("No region that may serve this request has room now.", retry_after_s=RETRY_AFTER_S)
            if isinstance(error, ResourceExhausted) or (request.error is not None and request.found_full):
                elsewhere = self._models.elsewhere(self._models.of(request.ask.model), request.route)
                if elsewhere:
                    return elsewhere
                # so is whoever else there is, and the client may wait as well as we
                raise error if isinstance(error, ResourceExhausted) or request.error is None else request.error
            left_s = give_up_s - self._clock()
            if left_s <= 0:
                raise self._nowhere(request, error)
            if not seeking:
                seeking.append(ExitStack())
                seeking[0].enter_context(self._seekers.one(chosen=bool(request.ask.request_class.geographies)))
            await self._clusters.wait_change(min(left_s, POLL_S))
            # One that failed us may have restarted under its old name; until something new is heard, its address may as
            # well still be dead, and the attempts are few.
            request.exclude = set().union(
                *(each.view.avoided(request.exclude, self._clock()) for each in self._clusters)
            )
            request.exclude_lbs = self._models.still_away(request.exclude_lbs)

    def _waits(self, request: Request) -> bool:
        """It can go back into the queue. One that was failed by somebody cannot: there it would be called for whom it
        must not go to."""
        return (
            not request.exclude
            and not request.exclude_lbs
            and self._models.may_wait(self._models.of(request.ask.model), request.route)
        )

    async def _here(self, request: Request, cluster: Cluster) -> tuple[common_pb2.Placement | None, PinyonError]:
        """A placement on instances of the cluster, or why there is none."""
        exclude = self._excluded(request, cluster)
        if self._by_routing:
            try:
                return self._own_choice(request, exclude, cluster), _FINE
            except Unavailable as unavailable:
                return None, unavailable
        own = True
        error: PinyonError
        try:
            keys = None if self._keys_are(cluster, request.ask.model) else b""
            asked = request.schedule_request(exclude, keys)
            return await cluster.conductor.place(asked, request.schedule_bytes(exclude)), _FINE
        except ConductorAway as away:
            error = away
        except ResourceExhausted as rejected:
            return None, rejected
        except (Unavailable, NotFound) as refusal:
            # The model is ours: what the conductor does not know is any instance of it, or not yet.
            error, own = refusal, cluster.view.doubts(request.ask.model)
        if own:
            try:
                return self._own_choice(request, exclude, cluster), _FINE
            except Unavailable as unavailable:
                error = unavailable
        return None, error

    def _forbidden(self, request: Request) -> str:
        whose = request.ask.request_class
        reasons = {
            each.reason
            for each in self._models.dry_run(self._models.of(request.ask.model), whose.geographies, whose.tenant)
        }
        return f"No region that is known may serve this request: {'; '.join(sorted(reasons))}."

    def _own_choice(self, request: Request, exclude: Collection[str], cluster: Cluster) -> common_pb2.Placement:
        placement = cluster.view.choose(
            request.ask.model,
            request.total_tokens,
            exclude,
            self._clock(),
            request.routed,
            careful=request.attempt > 0,
        )
        if not self._by_routing:
            self._metrics.fallbacks.add()
        return placement

    def _keys_are(self, cluster: Cluster, model: str) -> bool:
        """Whether the block keys of requests are those of the cluster's instances: they are the own cluster's."""
        return cluster is self._clusters.home or cluster.view.same_keys(self._clusters.home.view, model)

    def _excluded(self, request: Request, cluster: Cluster) -> set[str]:
        """Those that failed this request or were taken out, and those that may not go on with what it has got. If then
        nobody is left, and the client has seen nothing, it starts over."""
        excluded = request.exclude | cluster.removed if cluster.removed else request.exclude
        if not (request.tokens and request.fingerprint):
            return excluded
        model, view = request.ask.model, cluster.view
        exclude = excluded | view.with_other_weights(model, request.fingerprint)
        if len(exclude) == len(excluded):
            return exclude
        if request.can_start_over and not view.servable(model, self._clock(), request.total_tokens, exclude):
            _log.warning(
                "nobody else has the weights that generated: from the start",
                extra={"request_id": request.ask.request_id, "generated": len(request.tokens)},
            )
            request.start_over()
            return excluded
        return exclude

    def _nowhere(self, request: Request, error: PinyonError) -> PinyonError:
        home = self._clusters.home.view
        if request.tokens and home.with_other_weights(request.ask.model, request.fingerprint):
            return Unavailable(
                "The instance that generated went away, and no other one serves the weights it began with.",
                retry_after_s=RETRY_AFTER_S,
            )
        message = "No instance is available for this model." if isinstance(error, NotFound) else error.message
        return Unavailable(message, retry_after_s=error.retry_after_s or RETRY_AFTER_S)


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
