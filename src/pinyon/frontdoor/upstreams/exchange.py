"""A whole HTTP exchange with a target: the seam between who decides where a request goes and who brings it there."""

from __future__ import annotations

from collections.abc import Awaitable
from math import inf
from typing import NamedTuple, Protocol

from pinyon.core.request import RequestClass
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.served import Served
from pinyon.routing.target import Target
from pinyon.routing.target_policy import Routed


class Outgoing(NamedTuple):
    """A request's head as it goes on, to whatever target. ``fields`` are lines: all but the host, the key and the
    length, which are the target's business."""

    target: bytes
    """From ``/v1/`` on, with the query."""
    fields: bytes
    method: bytes = b"POST"
    request_id: str = ""
    """For logs. This and what follows is for another region, which gets it beside the request."""
    model: str = ""
    whose: RequestClass | None = None


class Targets(Protocol):
    """The servers of this region, or other regions: who brings requests there, and remembers what became of them."""

    def exchange(
        self, target: str, head: Outgoing, body: bytes | bytearray, deadline_s: float, first_byte_s: float = inf
    ) -> Awaitable[Answer]:
        """Returns when the answer's head is here; the caller closes the answer. ``deadline_s`` is for all of it, by the
        load balancer's clock; ``first_byte_s`` is how long the answer may take to begin.

        Raises :class:`Absent`, :class:`Broke`, :class:`ConnectionsFull` and :class:`NoRoom`
        (:mod:`pinyon.frontdoor.failures`).
        """
        ...

    def sent(self, served: Served, target: str, routed: Routed) -> Target | None:
        """A request goes there; what this returns is for :meth:`ended`."""
        ...

    def ended(self, target: str, sent: Target | None) -> None:
        """However it did."""
        ...

    def answered(self, target: str, began_s: float) -> None:
        """Well, and to its end."""
        ...

    def failed(self, target: str, *, absent: bool = False) -> None:
        """By the target's fault; ``absent``: it was not there."""
        ...

    def refused(self, model: str, target: str, rest_s: float) -> None:
        """It had no room; ``rest_s`` is when it wants to be asked again, 0 if it did not say."""
        ...
