"""State of one request that goes on to somebody else's server. :class:`Forwarding` acts, this knows."""

from __future__ import annotations

from typing import Any, NamedTuple

from pinyon.core.errors import PinyonError
from pinyon.core.request import RequestClass
from pinyon.frontdoor.admission import LimitedTurn
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.served import Served
from pinyon.frontdoor.upstreams.exchange import Outgoing
from pinyon.frontdoor.upstreams.passing import Passing
from pinyon.frontdoor.upstreams.reading import Asked
from pinyon.frontdoor.upstreams.usage import Used
from pinyon.http.answer import Reply
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import Choice, Route, Where

__all__ = ["Forward", "Refusal"]


class Refusal(NamedTuple):
    """A server's answer that it has no room, in case nobody else has."""

    status: int
    body: bytes
    kind: bytes
    fields: bytes


class Forward:
    """``attempts`` are those that cost something; ``tries`` counts also those that found nobody."""

    __slots__ = ("asked", "attempts", "choice", "cluster", "deadline_s", "error", "exclude", "geographies",
                 "head", "log_id", "outgoing", "passing", "refusal", "reply", "route", "routed", "sender", "served",
                 "status", "ticket", "tries", "used")  # fmt: skip

    def __init__(
        self, head: Head, log_id: str, asked: Asked, served: Served, ticket: LimitedTurn, reply: Reply,
        outgoing: Outgoing, routed: Routed, geographies: tuple[str, ...], deadline_s: float, sender: str = "",
    ) -> None:  # fmt: skip
        """``sender``: the region that it has come from, if that is another one."""
        self.head, self.asked, self.served, self.ticket, self.reply = head, asked, served, ticket, reply
        self.log_id = log_id
        self.outgoing, self.routed, self.geographies = outgoing, routed, geographies
        self.deadline_s = deadline_s
        self.sender = sender
        self.exclude: set[str] = set()
        """Targets that have failed it, or refused it."""
        self.route = Route(routed, geographies, head.client.tenant, sender, self.exclude)
        self.choice = Choice(Where.WAIT)
        self.cluster = ""
        """That the chosen server is of, if that is one of another region."""
        self.attempts = self.tries = 0
        self.error: PinyonError | None = None
        """Of the last attempt."""
        self.refusal: Refusal | None = None
        self.passing: Passing | None = None
        """An answer is on its way."""
        self.status = 0
        self.used: Used | None = None

    @property
    def used_tokens(self) -> int:
        """As far as anybody knows."""
        if self.used is not None:
            return self.used.prompt + self.used.completion
        if self.passing is None:
            return 0
        return self.asked.prompt_tokens + self.passing.events

    def enter(self, demand: int, *, room: bool) -> bool:
        """Whether its turn is now; else :meth:`wait`. ``room``: there is some. Raises as :meth:`Ticket.enter`."""
        return self.ticket.enter(self.asked.tokens, priority=self.priority, demand=demand, room=room)

    async def wait(self) -> None:
        """In line. Raises as :meth:`Ticket.turn`, and :class:`Unavailable` when nobody is there."""
        await self.served.patiently(self.ticket.wait())

    async def again(self, demand: int) -> None:
        """There was no room after all: back into the line, where it was."""
        await self.served.patiently(self.ticket.again(demand))

    @property
    def priority(self) -> int:
        labels, client = self.head.labels, self.head.client
        priority = labels.priority if labels.priority is not None else self.asked.priority
        return client.priority if priority is None else priority

    def whose(self) -> RequestClass:
        """For another region. What it says of itself, that one reads from it."""
        labels = self.head.labels
        return RequestClass(
            session=labels.session,
            user=labels.user,
            priority=self.priority,
            tenant=self.head.client.tenant,
            geographies=self.geographies,
        )

    def facts(self) -> dict[str, Any]:
        """For the log."""
        facts: dict[str, Any] = {"model": self.served.name}
        if self.choice.target:
            facts["upstream"] = self.choice.target
        if self.tries > 1:
            facts["attempts"] = self.tries
        if self.used is not None:
            facts["prompt_tokens"], facts["completion_tokens"] = self.used.prompt, self.used.completion
        return facts
