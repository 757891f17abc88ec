"""What the request loop knows of one request: where it may go, where it is, and who has failed it. No I/O."""

from __future__ import annotations

from pinyon.core.errors import PinyonError
from pinyon.frontdoor.served import Served
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import Choice, Route, Where
from pinyon.runtime.telemetry import Span

_NOWHERE_YET = Choice(Where.WAIT)
_ANYTHING = Route(Routed())


class Flight:
    """The loop and the kind of target act, this knows. Kinds of target have requests of their own, which derive from
    it."""

    __slots__ = (
        "arrived_s", "choice", "deadline_s", "error", "exclude", "full", "name", "paid", "priority", "route", "sender",
        "served", "tokens_wanted", "traceparent", "tries",
    )  # fmt: skip

    served: Served
    """The model that it is for."""

    def __init__(
        self, name: str, traceparent: str, arrived_s: float, deadline_s: float, tokens_wanted: int, priority: int
    ) -> None:
        """``name`` is for logs."""
        self.name = name
        self.traceparent = traceparent
        """Of whoever sent it; empty: nobody said. Of its own span, once it is on its way."""
        self.arrived_s, self.deadline_s = arrived_s, deadline_s
        self.tokens_wanted = tokens_wanted
        """That it may take: its prompt's, and those that it may generate."""
        self.priority = priority
        """Lower goes first, of one tenant's."""
        self.route = _ANYTHING
        """Set by :meth:`depart`, as ``served``."""
        self.sender = ""
        """The region that it has come from, if that is another one: it goes to no third one."""
        self.choice = _NOWHERE_YET
        """Where the present attempt runs."""
        self.exclude: set[str] = set()
        """Targets and load balancers of other regions that have failed it, or refused it."""
        self.tries = 0
        """Attempts."""
        self.paid = 0
        """Those of them that cost somebody something."""
        self.error: PinyonError | None = None
        """Of the last attempt, if it failed."""
        self.full: PinyonError | None = None
        """What somebody said who had no room for it, if the client may be told that."""

    def depart(self, served: Served, routed: Routed, geographies: tuple[str, ...], tenant: str) -> None:
        """Says what it is for, and what its target is chosen by, before the loop has it."""
        self.served = served
        self.route = Route(routed, geographies, tenant, self.sender, self.exclude)

    @property
    def departed(self) -> bool:
        return self.route is not _ANYTHING

    # -- what a kind of target says of its requests

    @property
    def used_tokens(self) -> int:
        """That it has taken, as far as anybody knows."""
        raise NotImplementedError

    @property
    def outcome(self) -> str:
        """How it has ended, in a word; empty while it has not."""
        raise NotImplementedError

    def failed_as(self, error: PinyonError) -> str:
        """Returns how it has ended by that error, in a word."""
        return error.grpc_code.lower()

    def traced(self, span: Span) -> None:
        """It is on its way as that span."""
        self.traceparent = span.traceparent or self.traceparent
