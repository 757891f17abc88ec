"""A whole HTTP exchange with a target: the seam between who decides where a request goes and who brings it there."""

from __future__ import annotations

from math import inf
from typing import NamedTuple, Protocol

from services.lb.upstreams.answer import Answer

__all__ = ["Exchange", "Outgoing"]


class Outgoing(NamedTuple):
    """A request's head as it goes on, to whatever target. ``fields`` are lines: all but the host, the key and the
    length, which are the target's business."""

    target: bytes
    """From ``/v1/`` on, with the query."""
    fields: bytes
    method: bytes = b"POST"


class Exchange(Protocol):
    """With the servers of this region, or with other regions."""

    async def exchange(
        self, target: str, head: Outgoing, body: bytes | bytearray, deadline_s: float, first_byte_s: float = inf
    ) -> Answer:
        """Returns when the answer's head is here; the caller closes the answer. ``deadline_s`` is for all of it, by the
        load balancer's clock; ``first_byte_s`` is how long the answer may take to begin.

        Raises :class:`PinyonError`; :class:`services.lb.upstreams.failures.Broke` with ``begun`` alone means that the
        target has answered in part: then nobody else should be asked.
        """
        ...
