"""The state of a request in the request loop: where it may go, where it is, and which targets failed it. No I/O."""

from __future__ import annotations

from pinyon.core.errors import PinyonError
from pinyon.frontdoor.served_model import ServedModel
from pinyon.routing.target import Routed
from pinyon.routing.two_layers import RoutedRequest, RoutingChoice, Where
from pinyon.runtime.telemetry import Span

_NOWHERE_YET = RoutingChoice(Where.WAIT)


class Flight:
    """The state of one request, on which the loop and the kind of target act. Each kind of target has a subclass for
    its own requests."""

    __slots__ = (
        "arrived_s", "choice", "deadline_s", "error", "exclude", "full", "name", "paid", "priority", "route", "sender",
        "served", "tokens_wanted", "traceparent", "tries",
    )  # fmt: skip

    served: ServedModel
    """The model that the request is for, set by :meth:`depart`."""
    route: RoutedRequest
    """The keys and rules that its target is chosen by, set by :meth:`depart`."""

    def __init__(
        self, name: str, traceparent: str, arrived_s: float, deadline_s: float, tokens_wanted: int, priority: int
    ) -> None:
        """Stores what is known when the request arrives; ``name`` identifies it in logs."""
        self.name = name
        self.traceparent = traceparent
        """The trace context of the request's sender, empty if there is none; later that of its own span."""
        self.arrived_s, self.deadline_s = arrived_s, deadline_s
        self.tokens_wanted = tokens_wanted
        """The tokens that the request may take: its prompt's and those that it may generate."""
        self.priority = priority
        """The priority among the requests of one tenant; lower goes first."""
        self.sender = ""
        """The region that the request came from, if that is another one: it is never sent on to a third."""
        self.choice = _NOWHERE_YET
        """The place where the present attempt runs."""
        self.exclude: set[str] = set()
        """The targets, and load balancers of other regions, that have failed or refused the request."""
        self.tries = 0
        """The number of attempts."""
        self.paid = 0
        """The number of attempts that cost something."""
        self.error: PinyonError | None = None
        """The error of the last attempt, if it failed."""
        self.full: PinyonError | None = None
        """The error of a target that had no room for the request, if the client may be told it."""

    def depart(self, served: ServedModel, routed: Routed, geographies: tuple[str, ...], tenant: str) -> None:
        """Sets the model and what the target is chosen by, before the request loop gets the request."""
        self.served = served
        self.route = RoutedRequest(routed, geographies, tenant, self.sender, self.exclude)

    # -- implemented by each kind of target

    @property
    def used_tokens(self) -> int:
        """The tokens that the request has taken, as far as is known."""
        raise NotImplementedError

    @property
    def outcome(self) -> str:
        """The word for how the request has ended; empty while it has not."""
        raise NotImplementedError

    def failed_as(self, error: PinyonError) -> str:
        """Returns how the request has ended by that error, in a word."""
        return error.grpc_code.lower()

    def traced(self, span: Span) -> None:
        """Traces the request by that span from now on."""
        self.traceparent = span.traceparent or self.traceparent
