"""State of one request that goes on to somebody else's server. The loop and :class:`ServerKind` act, this knows."""

from __future__ import annotations

from typing import Any, NamedTuple

from pinyon.core.errors import PinyonError
from pinyon.core.request import RequestClass, Usage
from pinyon.frontdoor.failures import Refused
from pinyon.frontdoor.flight import Flight
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.line import Turn
from pinyon.frontdoor.upstreams.passing import Passing
from pinyon.frontdoor.upstreams.reading import Asked
from pinyon.http.answer import Reply
from pinyon.routing.two_layers import Where
from pinyon.runtime.telemetry import Span


class Incoming(NamedTuple):
    """How a request has come: its place in the line, how long it may take (s), and of one from another region which one
    that is, and the model that it is for."""

    ticket: Turn
    limit_s: float
    sender: str = ""
    model: str = ""


class Forward(Flight):
    """``asked`` is what its body says; ``url`` and the lines ``fields`` are what of its head goes on."""

    __slots__ = (
        "_used",
        "asked",
        "body",
        "cluster",
        "fields",
        "final",
        "head",
        "passing",
        "reply",
        "status",
        "ticket",
        "url",
    )

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
        """The adopted cluster that the present attempt runs in; empty: the region's own, or another region."""
        self.passing: Passing | None = None
        """An answer is on its way."""
        self.final = False
        """The client has seen something of the answer that failed."""
        self.status = 0
        self._used: Usage | None = None

    @property
    def used(self) -> Usage | None:
        """Tokens that its answer took, as far as that has come and says so."""
        if self._used is None and self.passing is not None:
            self._used = self.passing.used()
        return self._used

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
        """The present attempt is at a server, and not in another region."""
        return self.choice.where is not Where.REMOTE

    def whose(self) -> RequestClass:
        """For another region. What it says of itself, that one reads from it."""
        labels = self.head.labels
        return RequestClass(
            session=labels.session,
            user=labels.user,
            priority=self.priority,
            tenant=self.head.client.tenant,
            geographies=tuple(self.route.geographies),
        )

    def facts(self) -> dict[str, Any]:
        """Returns what the access log says of it."""
        facts: dict[str, Any] = {"model": self.served.name}
        if self.choice.target:
            facts["upstream"] = self.choice.target
        if self.tries > 1:
            facts["attempts"] = self.tries
        if (used := self.used) is not None:
            facts["prompt_tokens"], facts["completion_tokens"] = used.prompt_tokens, used.completion_tokens
        return facts
