"""One inference server: how it is reached, and what is known of it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Mapping
from math import inf
from typing import Any, NamedTuple

from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Broke
from pinyon.frontdoor.upstreams.connection import ConnectionLimits
from pinyon.frontdoor.upstreams.pool import Pool
from pinyon.frontdoor.upstreams.url import UpstreamUrl
from pinyon.routing.learned_capacity import CAPACITY_GUESS, LearnedCapacity
from pinyon.routing.server_load import ServerKind
from pinyon.routing.target import Report

PROBE_CONNECTIONS = 4
"""Of its own: how a server is must be found out also while all others are taken."""


class Said(NamedTuple):
    """Its answer to a small question."""

    status: int
    body: bytes


class Server:
    """Changed by the :class:`pinyon.frontdoor.upstreams.fleet.Fleet` and who watches servers for it."""

    __slots__ = ("_fixed", "_prefix", "capacity", "gone", "healthy", "kind", "lacks", "learned", "models", "name",
                 "outstanding", "pool", "probes", "removed", "report", "rests_until_s", "sharers",
                 "told_capacity", "url")  # fmt: skip

    def __init__(
        self,
        url: UpstreamUrl,
        limits: ConnectionLimits,
        connections: int,
        capacity: int,
        key: str = "",
        tls: ssl.SSLContext | None = None,
        sharers: int = 1,
    ) -> None:
        """``capacity`` in requests; 0: it is not set. ``key`` is for its Authorization field. So many load balancers
        on this host send to it, this one among them."""
        self.url = url
        self.name = str(url)
        self.pool = Pool(url, limits, connections, tls)
        self.probes = Pool(url, limits, PROBE_CONNECTIONS, tls)
        self.capacity = capacity
        self.told_capacity = 0
        """What it said of itself."""
        self.sharers = sharers
        self.learned = LearnedCapacity(self.share_of(CAPACITY_GUESS))
        self.kind: ServerKind | None = None
        """By its metrics; None: it shows none that are understood."""
        self.models: dict[str, Mapping[str, Any]] = {}
        """What it lists, by name; still there while it is away."""
        self.healthy = False
        self.gone = False
        """Nobody listened there: whoever does next has an empty cache."""
        self.lacks = "it has not been asked yet"
        """Why it serves nothing, if it does not; one sentence without a capital."""
        self.removed = False
        """Somebody has said that it gets nothing new."""
        self.rests_until_s = 0.0
        """It asked to be left alone until then."""
        self.outstanding = 0
        """Requests of ours that it has, of all models."""
        self.report = Report()
        """Its last one."""
        self._prefix = url.prefix.encode("ascii")
        self.use_key(key)

    def use_key(self, key: str) -> None:
        """From the next request on."""
        authorization = b"authorization: Bearer %b\r\n" % key.encode("ascii") if key else b""
        self._fixed = b"host: %b\r\n%b" % (self.url.authority.encode("ascii"), authorization)

    @property
    def room_for(self) -> int:
        """Requests its batch holds, as it was set or said; 0: unknown. Of who says nothing of its load, and so of what
        others send: our share of what was set, or what is learned."""
        if self.kind is not None:
            return self.capacity or self.told_capacity
        return self.share_of(self.capacity or self.told_capacity) or self.learned.value

    def share_of(self, requests: int) -> int:
        """Rounded up."""
        return -(-requests // self.sharers)

    def send(self, url: bytes, fields: bytes, body: bytes | bytearray, first_byte_s: float) -> Awaitable[Answer]:
        """``url``: from ``/v1/`` on. ``fields`` are lines: all but the host, the key and the length. See
        :meth:`pinyon.frontdoor.upstreams.pool.Pool.send`."""
        head = self._head(b"POST", url, fields, b"content-length: %d\r\n" % len(body))
        return self.pool.send(head, body, first_byte_s)

    async def ask(self, path: bytes, within_s: float, bytes_max: int) -> Said:
        """A small question, GET, and its answer whole, up to a bound. Raises :class:`Unavailable`: :class:`Absent`
        where nobody is there, :class:`Broke` for what is no answer, is too long, or comes too late."""
        head = self._head(b"GET", path, b"accept: */*\r\n")
        try:
            async with asyncio.timeout(within_s):
                answer = await self.probes.send(head, b"", inf)
                try:
                    body = await answer.whole(bytes_max)
                    if body is None:
                        raise Broke(f"The answer to {path.decode()} is longer than {bytes_max} bytes.", begun=True)
                    return Said(answer.status, body)
                finally:
                    answer.close()
        except TimeoutError:
            raise Broke(f"{path.decode()} is not answered in {within_s:g} s.", begun=False, silent=True) from None

    def close(self) -> None:
        self.pool.close()
        self.probes.close()

    def _head(self, method: bytes, url: bytes, fields: bytes, length: bytes = b"") -> bytes:
        return b"%b %b%b HTTP/1.1\r\n%b%b%b\r\n" % (method, self._prefix, url, self._fixed, length, fields)
