"""The state of one request for somebody else's server, on which the loop and :class:`ExchangeKind` act."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from pinyon.core.errors import PinyonError
from pinyon.core.request import RequestClass, Usage
from pinyon.frontdoor.failures import Refused
from pinyon.frontdoor.flight import Flight
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.line import Place
from pinyon.frontdoor.upstreams.passing import Passing
from pinyon.frontdoor.upstreams.reading import Asked
from pinyon.http.answer import Reply
from pinyon.routing.two_layers import Where
from pinyon.runtime.telemetry import Span


class Incoming(NamedTuple):
    """The circumstances of a request: its place in the line and its time limit (s). If another region sent it, also
    that region and the request's model."""

    ticket: Place
    limit_s: float
    sender: str = ""
    model: str = ""


class Forward(Flight):
    """The state of one request. ``asked`` is read from its body; ``url`` and the lines ``fields`` go to the server."""

    target_fact: ClassVar[str] = "upstream"
    """The name under which the access log has the target."""
    __slots__ = ("_used", "asked", "body", "cluster", "fields", "final", "head", "passing", "reply", "status",
                 "ticket", "url")  # fmt: skip

    def __init__(
        self, head: Head, body: bytes | bytearray, asked: Asked, fields: bytes, reply: Reply, incoming: Incoming
    ) -> None:
        assert head.raw is not None
        priority = head.labels.priority if head.labels.priority is not None else asked.priority
        super().__init__(
            head.log_id, head.traceparent, head.arrived_s, head.arrived_s + incoming.limit_s, asked.tokens,
            head.client.priority if priority is None else priority,
        )  # fmt: skip
        self.head, self.body, self.asked, self.reply = head, body, asked, reply
        self.url, self.fields = head.raw.target, fields
        self.ticket, self.sender = incoming.ticket, incoming.sender
        self.cluster = ""
        """The adopted cluster of the present attempt; empty for the region's own, or another region."""
        self.passing: Passing | None = None
        """The answer that is on its way, if any."""
        self.final = False
        """True if the client has seen a part of the answer that failed."""
        self.status = 0
        self._used: Usage | None = None

    @property
    def used(self) -> Usage | None:
        """The tokens that the answer took, if it has said so yet."""
        if self._used is None and self.passing is not None:
            self._used = self.passing.used()
        return self._used

    @property
    def first_s(self) -> float:
        """The time at which the answer's first byte came; 0 if none has."""
        return 0.0 if self.passing is None else self.passing.first_s

    def traced(self, span: Span) -> None:
        super().traced(span)
        if self.traceparent:
            self.fields += b"traceparent: %b\r\n" % self.traceparent.encode("ascii")

    @property
    def used_tokens(self) -> int:
        if self.passing is None:
            return 0
        used = self.used
        if used is not None:
            return used.prompt_tokens + used.completion_tokens
        return self.asked.prompt_tokens + self.passing.events

    @property
    def outcome(self) -> str:
        if not self.status:
            return ""
        if self.status < 400:
            return "answered"
        return "refused" if self.status < 500 else "failed"

    def failed_as(self, error: PinyonError) -> str:
        if isinstance(error, Refused):
            return "refused" if error.status < 500 else "failed"
        return super().failed_as(error)

    @property
    def here(self) -> bool:
        """True if the present attempt is at a server, not in another region."""
        return self.choice.where is not Where.REMOTE

    def whose(self) -> RequestClass:
        """Returns the request's class for another region, which reads the rest from the request."""
        labels = self.head.labels
        return RequestClass(
            session=labels.session,
            user=labels.user,
            priority=self.priority,
            tenant=self.head.client.tenant,
            geographies=tuple(self.route.geographies),
        )

    def facts(self) -> dict[str, Any]:
        """Returns the facts for the access log."""
        facts: dict[str, Any] = {"model": self.served.name}
        if self.choice.target:
            facts[self.target_fact] = self.choice.target
        if self.tries > 1:
            facts["attempts"] = self.tries
        if (used := self.used) is not None:
            facts["prompt_tokens"], facts["completion_tokens"] = used.prompt_tokens, used.completion_tokens
        return facts
