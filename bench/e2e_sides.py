"""The sides that take requests in ``bench/e2e.py``: our suite and another router by HTTP, and directly the servers
behind each of them. All get prompts of their own, of the same kind."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bench.e2e_cluster import BLOCK_TOKENS, card_of
from bench.e2e_direct import DirectClient, Work
from bench.load import HttpClient, Sample
from bench.router_prompts import Prompts
from launch.cluster import LocalCluster
from pinyon.core.block_keys import namespace
from pinyon.frontdoor.instances.prompts import KeyChains
from pinyon.frontdoor.instances.tokenizer_process import tokenize
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.identity import LB, WORKER, peer_name

CONCURRENCY = 16


class Taker(Protocol):
    """One side, while prompts of one kind are measured."""

    @property
    def name(self) -> str: ...

    @property
    def pids(self) -> Mapping[str, int]:
        """The processes whose CPU counts, by name; empty for a side that is there for its latency."""
        ...

    def prepare(self, count: int) -> Sequence[Any]:
        """Returns ``count`` new requests."""
        ...

    async def send(self, number: int, request: Any) -> Sample:
        """Sends a request by the client of that number."""
        ...

    async def close(self) -> None: ...


class HttpTaker:
    """A side that is asked by HTTP; several ``entries`` take turns."""

    def __init__(
        self,
        name: str,
        prompts: Prompts,
        entries: Sequence[str],
        pids: Mapping[str, int] = {},  # never changed
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.pids = pids
        self._prompts = prompts
        self._host = entries[0]
        self._clients = [HttpClient(entries[number % len(entries)], context) for number in range(CONCURRENCY)]
        self._turns = itertools.count() if len(entries) > 1 else None

    def prepare(self, count: int) -> list[bytes]:
        return self._prompts.requests(self._host, count)

    async def send(self, number: int, request: bytes) -> Sample:
        at = number if self._turns is None else next(self._turns) % CONCURRENCY
        return await self._clients[at].send(request)

    async def close(self) -> None:
        for client in self._clients:
            client.close()


class DirectTaker:
    """The workers of our suite, asked by the load balancer's transport; each has its share of the beginnings."""

    name = "direct"
    pids: Mapping[str, int] = {}

    def __init__(self, prompts: Prompts, cluster: LocalCluster) -> None:
        access = cluster.access
        self._prompts = prompts
        self._card = card_of(cluster)
        layout_id = self._card.config.kv_layout(BLOCK_TOKENS).layout_id
        self._start = namespace(self._card.fingerprint, layout_id, "", access.secret)
        self._chains = KeyChains()
        channels = PLAIN_CHANNELS
        if access.root is not None:
            from pinyon.runtime.tls import Tls  # with TLS only: it brings cryptography

            folder = access.first(LB)
            channels = Channels(Tls(folder / "tls.crt", folder / "tls.key", folder / "ca.crt"))
        self._clients = [
            DirectClient(service.endpoints["grpc"], channels.sessions_to(peer_name(WORKER, service.name)))
            for service in cluster.of_kind("mixed")
        ]

    def prepare(self, count: int) -> list[tuple[int, Work]]:
        made = []
        for _ in range(count):
            group, text = self._prompts.text()
            tokens = tokenize(self._card, text)
            made.append((group, (tokens, self._chains.packed(self._start, tokens, BLOCK_TOKENS))))
        return made

    async def send(self, number: int, request: tuple[int, Work]) -> Sample:
        group, work = request
        return await self._clients[group % len(self._clients)].send(work, self._prompts.max_tokens)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
