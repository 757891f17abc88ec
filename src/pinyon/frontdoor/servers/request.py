"""The state of one request for an instance's server."""

from __future__ import annotations

from typing import ClassVar

from pinyon.frontdoor.instances.request import Request
from pinyon.frontdoor.servers.so_far import StreamSoFar
from pinyon.frontdoor.upstreams.forward import Forward


class ServerRequest(Forward):
    """The state of one request: an exchange with a server, for which an instance is placed as for other requests. The
    reader of the body sets what is declared here."""

    target_fact: ClassVar[str] = "instance"
    __slots__ = ("adapter", "asks", "failed_at", "keyed", "planned", "salt", "so_far")

    asks: Request
    """The request as a conductor is asked about it."""
    failed_at: dict[str, object]
    """The servers that failed the request, by the names of their instances."""
    keyed: bool
    """True if ``asks`` has the prompt's tokens and block keys; otherwise the prompt's text decides, here."""
    adapter: str
    """The adapter that the instance must list; empty for none."""
    planned: bool
    """True if a plan goes with the body, for an instance that understands it."""
    salt: str
    """The salt by which the server's cache keeps the request apart; empty for none."""
    so_far: StreamSoFar | None
    """The answer so far, if another server could go on with it."""
