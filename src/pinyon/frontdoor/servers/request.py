"""The state of one request for an instance's server."""

from __future__ import annotations

from typing import ClassVar

from pinyon.frontdoor.head import Head
from pinyon.frontdoor.instances.request import Request
from pinyon.frontdoor.upstreams.forward import Forward, Incoming
from pinyon.frontdoor.upstreams.reading import Asked
from pinyon.http.answer import Reply


class ServerRequest(Forward):
    """The state of one request: an exchange with a server, for which an instance is placed as for other requests.

    ``asks`` has what a conductor is asked. ``keyed`` says that it has the prompt's tokens and block keys: otherwise the
    load balancer chooses by the prompt's text. ``planned`` says that a plan may go with the body, and ``salted`` that
    the body is for one tenant or salt. An ``adapter`` must be one that the instance lists."""

    target_fact: ClassVar[str] = "instance"
    __slots__ = ("adapter", "asks", "keyed", "planned", "salted")

    def __init__(
        self,
        head: Head,
        body: bytes | bytearray,
        asked: Asked,
        fields: bytes,
        reply: Reply,
        incoming: Incoming,
        asks: Request,
        adapter: str,
    ) -> None:
        super().__init__(head, body, asked, fields, reply, incoming)
        self.asks, self.adapter = asks, adapter
        self.keyed = asks.prompt_tokens > 0
        self.planned = self.salted = False
