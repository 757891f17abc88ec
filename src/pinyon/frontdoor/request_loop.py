"""The life of a request: it waits for its turn, runs on a target, and is retried on another target if that fails.

The loop is the same for all targets. A :class:`TargetKind` represents them: pinyon's instances with a conductor, or
OpenAI servers, and other regions that have the same. Between regions and clusters,
:class:`pinyon.frontdoor.served_models.ServedModels` chooses (SkyWalker §3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from pinyon.frontdoor.flight import Flight
from pinyon.frontdoor.line import Place
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.two_layers import RoutingChoice, Where
from pinyon.runtime.telemetry import Telemetry

NEWS_S: Final = 0.5
"""The longest wait for news, in seconds, as room may come up without any."""
TRIES_MAX: Final = 64
"""The maximum number of attempts of one request, including those that cost nothing."""
SHARE = 4
"""Requests for chosen regions that are away may hold one in ``SHARE`` slots, so that they keep out nobody else."""

F = TypeVar("F", bound=Flight)
F_contra = TypeVar("F_contra", bound=Flight, contravariant=True)


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """The limits of the loop: how many costly attempts (``attempts``) a request has, how long a request whose turn has
    come waits for a target (``wait_s``), and the queue's ``slots``."""

    attempts: int = 3
    wait_s: float = 10.0
    slots: int = 1024


class TargetKind(Protocol[F_contra]):
    """The kind of target that requests go to. It chooses the target within a cluster and runs attempts; the loop does
    the rest."""

    async def place(self, flight: F_contra, choice: RoutingChoice) -> PinyonError | None:
        """Sets where in the region, or in the adopted cluster of ``choice``, the next attempt runs. With
        ``Where.WAIT``, the load balancer knows of no room, and the request cannot wait in line.

        Returns why the attempt cannot run there; :class:`ResourceExhausted` means that the cluster has no room for it.
        """
        ...

    def queues(self, flight: F_contra) -> bool:
        """Returns whether the request goes back into the line when no target that may take it has room."""
        ...

    async def attempt(self, flight: F_contra) -> None:
        """Runs one attempt at the chosen place, after which ``flight`` has an ``outcome`` or an ``error``."""
        ...

    def retries(self, flight: F_contra) -> PinyonError | None:
        """Adds the target of a failed attempt to ``flight.exclude``, or returns the error that ends the request."""
        ...

    def gives_up(self, flight: F_contra) -> bool:
        """Returns whether to stop waiting for a target that may take the request."""
        ...

    def nobody(self, flight: F_contra, error: PinyonError) -> PinyonError:
        """Returns what the client is told when no target could take the request; ``error`` was the last obstacle."""
        ...

    async def wait_change(self, flight: F_contra, timeout_s: float) -> None:
        """Waits until a target may take a request that none could take, at most ``timeout_s``. Drops exclusions of
        targets that may have recovered meanwhile."""
        ...


class RequestLoop(Generic[F]):
    """The request loop of a load balancer. Every request runs in the task that calls :meth:`run`."""

    def __init__(
        self,
        models: ServedModels,
        kind: TargetKind[F],
        counted: DoorMetrics[F],
        telemetry: Telemetry,
        limits: LoopLimits,
        clock: Clock,
    ) -> None:
        self._models = models
        self._kind = kind
        self._counted = counted
        self._telemetry = telemetry
        self._wait_s = limits.wait_s
        self._clock = clock
        self._seekers_max = max(1, limits.slots // SHARE)
        self._seekers = 0
        """The requests that hold a slot of the queue while none of the regions that their clients chose is there."""

    async def run(self, flight: F, ticket: Place | None) -> None:
        """Runs the request until it has its ``outcome``. Raises the :class:`PinyonError` that it failed with.

        Without a ``ticket``, its turn has come: its slot is held for it.

        However it ends, even if cancelled, its ticket is left and nothing of the request remains on any hop."""
        outcome = "cancelled"
        with self._telemetry.span("lb.request", flight.traceparent, request_id=flight.name) as span:
            flight.traced(span)
            self._counted.began(flight)
            try:
                await self._run(flight, ticket)
                outcome = flight.outcome
            except PinyonError as error:
                outcome = flight.failed_as(error)
                raise
            finally:
                if ticket is not None:
                    ticket.leave(flight.used_tokens)
                now_s = self._clock()
                if outcome == "cancelled" and now_s >= flight.deadline_s:
                    outcome = "deadline_exceeded"
                span.set("outcome", outcome)
                self._counted.ended(flight, outcome, now_s)

    async def _run(self, flight: F, ticket: Place | None) -> None:
        models, kind, served, route = self._models, self._kind, flight.served, flight.route
        models.check_law(served, route)
        now = models.at_once(served, route)
        demand = models.demand(served, route)
        if ticket is not None and not ticket.enter(
            flight.tokens_wanted, priority=flight.priority, demand=demand, room=now is not None
        ):
            now = None
            await served.patiently(ticket.wait())
        while True:
            if now is None:
                await self._place(flight, ticket)
            else:
                flight.choice, now = now, None
            await kind.attempt(flight)
            if flight.outcome:
                return
            error = kind.retries(flight)
            if error is not None:
                raise error
            self._counted.retried(flight)

    async def _place(self, flight: F, ticket: Place | None) -> None:
        """Sets where the next attempt runs. Waits in line where possible, and for a limited time if no target is
        there."""
        models, kind, served, route = self._models, self._kind, flight.served, flight.route
        give_up_s = self._clock() + self._wait_s
        seeks = False
        try:
            while True:
                if ticket is not None:
                    ticket.release()  # from here on the request is counted where it goes
                choice = models.choose(served, route)
                if choice.where is Where.REMOTE:
                    flight.choice = choice
                    return
                if choice.where is Where.NOWHERE:
                    raise models.forbidden(served, route)
                if choice.where is Where.WAIT and kind.queues(flight) and await self._again(flight, ticket):
                    give_up_s = self._clock() + self._wait_s
                    continue
                error = await kind.place(flight, choice)
                if error is None:
                    return
                full = error if isinstance(error, ResourceExhausted) else flight.full
                if full is not None:
                    elsewhere = models.elsewhere(served, route)
                    if not elsewhere:
                        raise full  # the client can wait as well as the load balancer can
                    flight.choice = RoutingChoice(Where.REMOTE, elsewhere)
                    return
                left_s = give_up_s - self._clock()
                if left_s <= 0 or kind.gives_up(flight):
                    raise kind.nobody(flight, error)
                if route.geographies and not seeks:
                    if self._seekers >= self._seekers_max:
                        raise Unavailable(
                            "Nobody who may serve this request is there, and many wait for that.", retry_after_s=1.0
                        )
                    self._seekers += 1
                    seeks = True
                await kind.wait_change(flight, min(left_s, NEWS_S))
        finally:
            self._seekers -= seeks

    async def _again(self, flight: F, ticket: Place | None) -> bool:
        """Puts the request back in line if a live target may have room soon. Returns whether it did."""
        models, served, route = self._models, flight.served, flight.route
        if ticket is None or not models.selective or not served.layers.anybody(route):
            return False
        await served.patiently(ticket.again(models.demand(served, route)))
        return True
