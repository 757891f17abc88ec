"""One inference server: its connections and its state."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Mapping
from math import inf
from typing import Any

from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Broke
from pinyon.frontdoor.upstreams.connection import ConnectionLimits
from pinyon.frontdoor.upstreams.pool import ConnectionPool
from pinyon.frontdoor.upstreams.url import UpstreamUrl
from pinyon.routing.server_load import CAPACITY_GUESS, LearnedCapacity, ServerKind
from pinyon.routing.target import Report

PROBE_CONNECTIONS = 4
"""The number of separate connections for probes, which must work even when all others are taken."""


class Server:
    """One server, changed by the :class:`pinyon.frontdoor.upstreams.fleet.ServerFleet` and by the watch over it."""

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
        """Creates a server with a ``capacity`` in requests (0: not set) and a ``key`` for its Authorization field. On
        this host, ``sharers`` load balancers send to it, this one included."""
        self.url = url
        self.name = str(url)
        self.pool = ConnectionPool(url, limits, connections, tls)
        self.probes = ConnectionPool(url, limits, PROBE_CONNECTIONS, tls)
        self.capacity = capacity
        self.told_capacity = 0
        """The capacity that the server reported."""
        self.sharers = sharers
        self.learned = LearnedCapacity(self.share_of(CAPACITY_GUESS))
        self.kind: ServerKind | None = None
        """The kind of server, recognized by its metrics; None if it shows none that are understood."""
        self.models: dict[str, Mapping[str, Any]] = {}
        """The models that the server lists, by name; kept while it is away."""
        self.healthy = False
        self.gone = False
        """True if the server did not listen: the next one there has an empty cache."""
        self.lacks = "it has not been asked yet"
        """The reason why the server serves nothing, if so: a sentence without a capital letter."""
        self.removed = False
        """True if somebody has declared that the server gets no new requests."""
        self.rests_until_s = 0.0
        """The end of the rest that the server asked for."""
        self.outstanding = 0
        """The number of our requests at the server, over all models."""
        self.report = Report()
        """The last report of the server."""
        self._prefix = url.prefix.encode("ascii")
        self.use_key(key)

    def use_key(self, key: str) -> None:
        """Sets the key from the next request on."""
        authorization = b"authorization: Bearer %b\r\n" % key.encode("ascii") if key else b""
        self._fixed = b"host: %b\r\n%b" % (self.url.authority.encode("ascii"), authorization)

    @property
    def room_for(self) -> int:
        """The requests that the server's batch holds, as set or reported; 0 if unknown. For a server that reports no
        load, and so not what others send, our share of what was set, or what was learned."""
        if self.kind is not None:
            return self.capacity or self.told_capacity
        return self.share_of(self.capacity or self.told_capacity) or self.learned.value

    def share_of(self, requests: int) -> int:
        """Returns our share of that many requests, rounded up."""
        return -(-requests // self.sharers)

    def send(self, url: bytes, fields: bytes, body: bytes | bytearray, first_byte_s: float) -> Awaitable[Answer]:
        """Sends a POST request. ``url`` begins with ``/v1/``; ``fields`` are all lines but host, key and length. See
        :meth:`pinyon.frontdoor.upstreams.pool.Pool.send`."""
        head = self._head(b"POST", url, fields, b"content-length: %d\r\n" % len(body))
        return self.pool.send(head, body, first_byte_s)

    async def ask(
        self, path: bytes, within_s: float, bytes_max: int, body: bytes = b"", pool: ConnectionPool | None = None
    ) -> tuple[int, bytes]:
        """Returns the status and body of a small GET request, of at most ``bytes_max``; with a ``body``, a JSON object,
        it is a POST request. It takes a connection of ``pool``, or one of those for probes. Raises
        :class:`Unavailable`: :class:`Absent` if the server is not there, :class:`Broke` for an invalid, too long or
        late answer."""
        head = self._head(b"GET", path, b"accept: */*\r\n")
        if body:
            fields = b"accept: */*\r\ncontent-type: application/json\r\n"
            head = self._head(b"POST", path, fields, b"content-length: %d\r\n" % len(body))
        try:
            async with asyncio.timeout(within_s):
                answer = await (pool or self.probes).send(head, body, inf)
                try:
                    said = await answer.whole(bytes_max)
                    if said is None:
                        raise Broke(f"The answer to {path.decode()} is longer than {bytes_max} bytes.", begun=True)
                    return answer.status, said
                finally:
                    answer.close()
        except TimeoutError:
            raise Broke(f"{path.decode()} is not answered in {within_s:g} s.", begun=False, silent=True) from None

    def close(self) -> None:
        self.pool.close()
        self.probes.close()

    def _head(self, method: bytes, url: bytes, fields: bytes, length: bytes = b"") -> bytes:
        return b"%b %b%b HTTP/1.1\r\n%b%b%b\r\n" % (method, self._prefix, url, self._fixed, length, fields)
