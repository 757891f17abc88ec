"""A load balancer and a conductor in this process, and hand-written OpenAI servers that register as instances."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from pinyon.api.common.v1 import common_pb2
from pinyon.core.block_keys import chain_block_keys, namespace, salt_of, secret_id, variant
from pinyon.model import load_card
from pinyon.runtime.security import Security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from services.lb.app import Lb
from services.lb.settings import LbSettings
from tests.idle import left_in
from tests.integration.conductor_parts import Reporter, World
from tests.integration.lb_harness import MODEL, WAIT_S, Front, spin
from tests.integration.upstream_parts import Asked, Behaviour, FakeServer, Wire, generate

SECRET = b"a secret of the cluster"
BLOCK_TOKENS = 16
LAYOUT_ID = "packed1:2x2x16x16:float32:4096:fake-engine"


class ServerInstance(FakeServer):
    """An OpenAI server that registers as an instance. Its ``tokens`` answer ``/tokenize``; None: it has no such
    path."""

    def __init__(self, name: str, model: str = MODEL, answer: Behaviour = generate, **changes: Any) -> None:
        super().__init__((model,), answer=self._answer)
        self.then = answer
        self.name = name
        self.info = {"model": model, "key_secret_id": secret_id(SECRET)} | changes
        self.tokens: Callable[[Any], list[int] | None] | None = tokens_of
        self.packing = "fake-engine"
        self.refusal = 400
        """The status for bodies of which it makes no tokens."""
        self.compared = asyncio.Event()
        """The event that the load balancer has asked for the last sample's tokens."""

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of the requests that clients sent."""
        return [each.body for each in self.requests]

    @property
    def requests(self) -> list[Asked]:
        return [each for each in self.asked if each.target != "/tokenize" or "client" in each]

    async def _answer(self, asked: Asked, wire: Wire) -> None:
        if asked.target != "/tokenize" or "client" in asked:
            await self.then(asked, wire)
            return
        if "continue_final_message" in asked.json or self.tokens is None:
            self.compared.set()
        found = None if self.tokens is None else self.tokens(asked.json)
        if found is None:
            await wire.whole(b"{}", 404 if self.tokens is None else self.refusal)
        else:
            await wire.whole(json.dumps({"tokens": found, "count": len(found)}).encode())

    async def register(self, world: World, held: tuple[int, ...] = ()) -> Reporter:
        self.reporter = Reporter(world.stub, self.name, common_pb2.ROLE_MIXED, held=held)
        info = self.reporter.info
        for name, value in ({"server_url": f"{self.url}/v1"} | self.info).items():
            setattr(info, name, value)
        info.layout.packing, info.layout.packed_bytes = self.packing, 4096
        assert (await self.reporter.connect()).lease_ms
        return self.reporter


def tokens_of(body: Any) -> list[int] | None:
    """Returns the tokens of a body as the built-in model makes them; None for a conversation that it refuses."""
    if "prompt" in body:
        return [int(each) for each in load_card().tokenizer.encode(body["prompt"])]
    template = load_card().chat_template
    how = {name: body[name] for name in ("add_generation_prompt", "continue_final_message") if name in body}
    return [int(each) for each in template.encode_chat(body["messages"], as_given=True, **how)]


def keys_of(text: str, tenant: str = "", salt: str = "", adapter: str = "") -> list[bytes]:
    """Returns the block keys of a completion's prompt for an instance of the test."""
    tokens = load_card().tokenizer.encode(text).tobytes()
    root = root_of(tenant, salt)
    return chain_block_keys(variant(root, "lora", f"{adapter}\0") if adapter else root, tokens, BLOCK_TOKENS)


def root_of(tenant: str = "", salt: str = "") -> bytes:
    return namespace("f", LAYOUT_ID, "", SECRET, salt_of(tenant, salt, SECRET))


@dataclass
class ServersBench(Front):
    """The load balancer with its conductor and the servers behind it."""

    lb: Lb
    world: World
    servers: list[ServerInstance]
    registry: CollectorRegistry
    endpoints: dict[str, str] = field(default_factory=dict)

    @property
    def http(self) -> str:
        return self.endpoints["http"]

    def gauge(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"pinyon_lb_{name}", labels)
        assert value is not None, name
        return value

    async def known(self, *servers: ServerInstance) -> None:
        """Waits until the load balancer has compared and asked these servers."""
        for server in servers:
            await spin(lambda server=server: (each := self.lb.servers.get(server.name)) is not None and each.compared)

    async def holds(self, server: ServerInstance, held: list[bytes]) -> None:
        """Makes the instance report these blocks, and waits until the conductor knows."""
        numbers = tuple(int.from_bytes(each, "little") for each in held)
        await server.reporter.report(stored=numbers)
        assert (await self.world.holders(*numbers))[server.name] == len(held)

    async def idle(self) -> None:
        """Waits until nothing of any request is left."""
        await spin(lambda: not left_in("lb", self.gauge) and not any(server.open for server in self.servers))
        await spin(lambda: self.world.metric("inflight_placements") == 0)
        assert not any(each.server.outstanding for each in self.lb.servers)

    async def chat(self, text: str = "hello", headers: dict[str, str] | None = None, **fields: Any):
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return await self.post("/v1/chat/completions", body, headers)


@contextlib.asynccontextmanager
async def running_servers(
    *servers: ServerInstance, known: bool = True, conductor: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[ServersBench]:
    security = Security(secret=SECRET)
    async with World(security, **{"index_stride_tokens": 1} | (conductor or {})) as world:
        for server in servers:
            if not server.alive:
                await server.start()
            await server.register(world)
        registry = CollectorRegistry()
        named = {"conductor": world.address, "conductor_timeout_s": WAIT_S, "access_log": False}
        context = ServiceContext("lb", "lb-test", Telemetry("lb", "lb-test"), registry, asyncio.Event(), security)
        lb = Lb(LbSettings(**(named | settings)), context)
        bench = ServersBench(lb, world, list(servers), registry)
        try:
            bench.endpoints.update(await lb.start())
            if known:
                await bench.known(*servers)
            yield bench
        finally:
            await lb.close(0)
            for server in servers:
                server.reporter.call.cancel()
                await server.stop()
