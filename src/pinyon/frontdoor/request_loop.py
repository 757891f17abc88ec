"""A request's life: it waits for its turn, goes to a target, and again elsewhere when that fails it.

There is one loop for whatever requests go to. A :class:`Kind` says what that is: instances of pinyon on which a
conductor places, or OpenAI servers, and other regions that have the same. What is chosen between regions and clusters
is :class:`pinyon.frontdoor.served_models.ServedModels`' decision (SkyWalker §3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from pinyon.frontdoor.flight import Flight
from pinyon.frontdoor.line import Turn
from pinyon.frontdoor.metrics import RequestMetrics
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.two_layers import Choice, Where
from pinyon.runtime.telemetry import Telemetry

NEWS_S: Final = 0.5
"""Room may come up without news of it."""
TRIES_MAX: Final = 64
"""Attempts of one request, also of those that cost nothing."""
SHARE = 4
"""One in so many slots may be held so: whoever asks for a region that is away keeps the others from nobody."""

F = TypeVar("F", bound=Flight)
F_contra = TypeVar("F_contra", bound=Flight, contravariant=True)


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """``attempts`` of one request may cost somebody something. So long (``wait_s``) somebody is waited for who may take
    a request that has had its turn. ``slots`` are the queue's."""

    attempts: int = 3
    wait_s: float = 10.0
    slots: int = 1024


class Kind(Protocol[F_contra]):
    """What requests go to, and how they get there. It says which target of a cluster a request goes to, and runs
    attempts; the loop does what stands between."""

    async def place(self, flight: F_contra, choice: Choice) -> PinyonError | None:
        """Sets where in the region, or in the adopted cluster of that ``choice``, the next attempt runs. With
        ``Where.WAIT`` there is no room as far as the load balancer knows, and the request cannot wait in line.

        Returns why it cannot run there: :class:`ResourceExhausted` where that is full for it.
        """
        ...

    def queues(self, flight: F_contra) -> bool:
        """Whether it goes back into the line where nobody who may take it has room."""
        ...

    async def attempt(self, flight: F_contra) -> None:
        """One attempt, there. Afterwards ``flight`` has an ``outcome`` or an ``error``."""
        ...

    def retries(self, flight: F_contra) -> PinyonError | None:
        """After an attempt that failed: who has failed it is excluded; or returns what to tell the client."""
        ...

    def gives_up(self, flight: F_contra) -> bool:
        """Whether to wait for nobody any more who may take it."""
        ...

    def nobody(self, flight: F_contra, error: PinyonError) -> PinyonError:
        """Returns what the client is told when nobody came who could take it; ``error`` is what was last in the way."""
        ...

    async def wait_change(self, timeout_s: float) -> None:
        """Returns when somebody may take what nobody could, or after so long."""
        ...

    def forgive(self, flight: F_contra) -> None:
        """Some time has passed: who failed it may have come back."""
        ...


class Seekers:
    """Requests that hold a slot of the queue while nobody is there who may serve them."""

    def __init__(self, slots: int) -> None:
        self._most = max(1, slots // SHARE)
        self._count = 0

    def begin(self, *, chosen: bool) -> None:
        """One waits for somebody to come, until :meth:`end`. Raises :class:`Unavailable` when too many do that were
        sent for regions that their clients have ``chosen``; others wait for what everybody waits for."""
        if self._count >= self._most and chosen:
            raise Unavailable("Nobody who may serve this request is there, and many wait for that.", retry_after_s=1.0)
        self._count += chosen

    def end(self, *, chosen: bool) -> None:
        """It waits no more."""
        self._count -= chosen


class RequestLoop(Generic[F]):
    """One per load balancer. Every request runs in the task that calls :meth:`run`."""

    def __init__(
        self,
        models: ServedModels,
        kind: Kind[F],
        counted: RequestMetrics[F],
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
        self._seekers = Seekers(limits.slots)

    async def run(self, flight: F, ticket: Turn) -> None:
        """Until it has its ``outcome``. Raises the :class:`PinyonError` that it failed with.

        However it ends, also by cancelling, the ticket is left and nothing of the request is left on any hop.
        """
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
                ticket.leave(flight.used_tokens)
                now_s = self._clock()
                if outcome == "cancelled" and now_s >= flight.deadline_s:
                    outcome = "deadline_exceeded"
                span.set("outcome", outcome)
                self._counted.ended(flight, outcome, now_s)

    async def _run(self, flight: F, ticket: Turn) -> None:
        models, kind, served, route = self._models, self._kind, flight.served, flight.route
        models.check_law(served, route)
        now = models.at_once(served, route)
        demand = models.demand(served, route)
        if not ticket.enter(flight.tokens_wanted, priority=flight.priority, demand=demand, room=now is not None):
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

    async def _place(self, flight: F, ticket: Turn) -> None:
        """Sets where the next attempt runs. Waits in line where it can, and a while for somebody to come if nobody is
        there."""
        models, kind, served, route = self._models, self._kind, flight.served, flight.route
        give_up_s = self._clock() + self._wait_s
        seeks = False
        try:
            while True:
                ticket.release()  # from here on it is counted where it goes
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
                        raise full  # the client may wait as well as we
                    flight.choice = Choice(Where.REMOTE, elsewhere)
                    return
                left_s = give_up_s - self._clock()
                if left_s <= 0 or kind.gives_up(flight):
                    raise kind.nobody(flight, error)
                if not seeks:
                    self._seekers.begin(chosen=bool(route.geographies))
                    seeks = True
                await kind.wait_change(min(left_s, NEWS_S))
                kind.forgive(flight)
        finally:
            if seeks:
                self._seekers.end(chosen=bool(route.geographies))

    async def _again(self, flight: F, ticket: Turn) -> bool:
        """Back into the line, where it was, if somebody is there who may have room soon. Returns whether it could."""
        models, served, route = self._models, flight.served, flight.route
        return models.may_wait(served, route) and await served.patiently(ticket.again(models.demand(served, route)))
