"""A load balancer in this process in front of hand-written inference servers, with switches for faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry

from pinyon.core.clock import Clock
from pinyon.routing.server_load import SERVER_KINDS
from pinyon.routing.target import Target
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from services.lb.settings import LbSettings
from services.lb.upstream_app import UpstreamLb
from tests.idle import left_in
from tests.integration.lb_harness import WAIT_S, Front, port_of, spin

MODEL = "model-a"
DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    target: str
    fields: list[tuple[str, str]]
    body: bytes

    def __getitem__(self, name: str) -> str:
        (value,) = [value for each, value in self.fields if each == name]
        return value

    def __contains__(self, name: str) -> bool:
        return any(each == name for each, _ in self.fields)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """The connection to which an answer is written."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def whole(self, body: bytes, status: int = 200, fields: str = "", kind: str = "application/json") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{fields}\r\n"
        await self.raw(head.encode() + body)

    async def begin(self, fields: str = "", kind: str = "text/event-stream", status: int = 200) -> None:
        await self.raw(
            f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n{fields}\r\n".encode()
        )

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def drop(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Asked, Wire], Awaitable[None]]


async def generate(asked: Asked, wire: Wire) -> None:
    """Answers as an inference server does."""
    wanted = asked.json
    if wanted.get("stream"):
        await wire.begin()
        for number in range(wanted.get("max_tokens", 3)):
            await wire.chunk(b'data: {"choices":[{"text":"%d "}]}\n\n' % number)
        await wire.chunk(DONE)
        await wire.end()
        return
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    await wire.whole(json.dumps({"choices": [{"text": "an answer"}], "usage": usage}).encode())


class Then(Enum):
    """The end of an answer that is not whole: the server drops the connection, or sends nothing more."""

    DROP = 1
    STALL = 2


DROP, STALL = Then
Step = bytes | asyncio.Event | Then
"""A part of an answer: bytes to send, an event to wait for, or the end."""


def after(go: asyncio.Event, then: Behaviour = generate) -> Behaviour:
    """Returns the behaviour of a server that waits before it answers."""

    async def answer(asked: Asked, wire: Wire) -> None:
        await go.wait()
        await then(asked, wire)

    return answer


def answers(body: bytes = b"{}", status: int = 200, fields: str = "", kind: str = "application/json") -> Behaviour:
    return lambda asked, wire: wire.whole(body, status, fields, kind)


def says(*steps: Step) -> Behaviour:
    """Returns the behaviour of a server that sends bytes as they are."""
    return lambda asked, wire: _play(wire, wire.raw, steps)


def streams(*steps: Step, fields: str = "", kind: str = "text/event-stream", trailers: bytes = b"") -> Behaviour:
    """Returns the behaviour of a server that sends bytes as the chunks of an answer."""

    async def answer(asked: Asked, wire: Wire) -> None:
        await wire.begin(fields, kind)
        await _play(wire, wire.chunk, steps)
        if not steps or steps[-1] is not DROP:
            await wire.raw(b"0\r\n%b\r\n" % trailers)

    return answer


async def _play(wire: Wire, send: Callable[[bytes], Awaitable[None]], steps: tuple[Step, ...]) -> None:
    for step in steps:
        if step is DROP:
            wire.drop()
        elif step is STALL:
            await asyncio.Event().wait()
        elif isinstance(step, bytes):
            await send(step)
        elif isinstance(step, asyncio.Event):
            await step.wait()


never = says(STALL)


def unless_poisoned(then: Behaviour) -> Behaviour:
    """Returns the behaviour of a server that answers as usual, but for poisoned requests."""
    return lambda asked, wire: (then if "poison" in asked.json else generate)(asked, wire)


class FakeServer:
    """An inference server; ``answer`` handles posted requests."""

    def __init__(self, models: tuple[str, ...] = (MODEL,), metrics: bool = True, answer: Behaviour = generate) -> None:
        self.models = models
        self.kind = SERVER_KINDS[0]
        """The kind of server whose gauges it shows."""
        self.told: dict[str, bytes] = {}
        """Bodies of its answers at further paths."""
        self.metrics = metrics
        self.answer = answer
        self.waiting = 0
        """The number of waiting requests that it reports."""
        self.running: int | None = None
        """The number of running requests that it reports; None: the true number."""
        self.health = 200
        self.health_asked = 0
        self.lists: bytes | None = None
        """The body in place of its list of models."""
        self.go = asyncio.Event()
        """The event that load queries wait for."""
        self.go.set()
        self.frozen = False
        """True while it accepts connections and answers nothing."""
        self.asked: list[Asked] = []
        self.questions = 0
        """The number of load queries."""
        self.asking = 0
        """The number of concurrent load queries."""
        self.asking_most = 0
        self.connections = 0
        self.open = 0
        """The number of posted requests being answered."""
        self.left = 0
        """The number of clients that left before their answer was complete."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = self.port or port_of(self)
        self._server = await asyncio.start_server(self._arrived, "127.0.0.1", self.port, limit=1 << 24)

    @property
    def alive(self) -> bool:
        return self._server is not None

    def kill(self) -> None:
        """Closes the listener and resets all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        """Stops the server as if it was killed."""
        self.frozen = False
        self.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles a connection. A coroutine might be cancelled before it begins, and the connection would stay open."""
        if self._server is None:
            writer.transport.abort()
            return
        self._writers.add(writer)
        task = asyncio.ensure_future(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (asked := await _read(reader)) is not None:
                while self.frozen:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                if asked.method == "POST":
                    await self._post(asked, reader, Wire(writer))
                else:
                    await self._tell(asked, Wire(writer))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _post(self, asked: Asked, reader: asyncio.StreamReader, wire: Wire) -> None:
        self.asked.append(asked)
        self.open += 1
        work = asyncio.ensure_future(self.answer(asked, wire))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.left += 1
                work.cancel()
                raise ConnectionResetError
            await work
        finally:
            self.open -= 1
            gone.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _tell(self, asked: Asked, wire: Wire) -> None:
        path = asked.target.partition("?")[0]
        if path == "/health":
            self.health_asked += 1
            await wire.whole(b"", self.health)
        elif path == "/v1/models":
            listed = {"object": "list", "data": [{"id": each, "max_model_len": 4096} for each in self.models]}
            await wire.whole(json.dumps(listed).encode() if self.lists is None else self.lists)
        elif path == "/metrics" and self.metrics:
            self.questions += 1
            self.asking += 1
            self.asking_most = max(self.asking_most, self.asking)
            try:
                await self.go.wait()
            finally:
                self.asking -= 1
            running = self.open if self.running is None else self.running
            page = b'%b{a="b"} %d\n%b %d\n' % (self.kind.running, running, self.kind.pending, self.waiting)
            await wire.whole(page, kind="text/plain")
        else:
            await wire.whole(self.told.get(path, b"{}"), 200 if path in self.told else 404)


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head[:-4].split("\r\n")
    method, target, _ = first.split(" ")
    fields = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines)]
    size = sum(int(value) for name, value in fields if name == "content-length")
    return Asked(method, target, fields, await reader.readexactly(size))


@dataclass
class Bench(Front):
    """The load balancer and the servers behind it."""

    lb: UpstreamLb
    servers: list[FakeServer]
    registry: CollectorRegistry
    endpoints: dict[str, str] = field(default_factory=dict)

    @property
    def http(self) -> str:
        return self.endpoints["http"]

    def gauge(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"pinyon_lb_{name}", labels) or 0.0

    @property
    def asked(self) -> list[int]:
        """The number of requests that each server got."""
        return [len(server.asked) for server in self.servers]

    def live(self, *servers: FakeServer, model: str = MODEL) -> bool:
        """Returns whether exactly these servers get requests."""
        served = self.lb.fleet.models.get(model)
        found = {target.name for target in served.targets() if target.live} if served is not None else set()
        return found == {server.url for server in servers}

    def remote(self, model: str = MODEL) -> list[Target]:
        """Returns the other regions that serve the model, as far as this load balancer knows."""
        served = self.lb.models.by_name.get(model)
        return [] if served is None else list(served.layers.remote)

    async def fill(self, server: FakeServer, waiting: int = 1) -> None:
        """Makes a server say that requests wait there, and waits until the load balancer has heard."""
        server.waiting = waiting
        await self.until(lambda: self.lb.fleet.servers[server.url].report.pending == waiting)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.lb.fleet.wait_change(0.02)

    async def known(self) -> None:
        """Waits until all servers have reported their load."""
        await self.until(
            lambda: all(
                server.healthy and all(target.reported_s > 0 for target in self._targets(server.name))
                for server in self.lb.fleet.servers.values()
            )
        )

    def _targets(self, name: str) -> list[Any]:
        found = [each.layers.local.get(name) for each in self.lb.fleet.models.values()]
        return [target for target in found if target is not None]

    async def idle(self) -> None:
        """Waits until nothing of any request is left."""
        fleet = self.lb.fleet
        await spin(
            lambda: (
                not left_in("lb", self.gauge)
                and not any(server.outstanding for server in fleet.servers.values())
                and not any(target.outstanding for name in fleet.servers for target in self._targets(name))
                and not any(server.open for server in self.servers)
                and not self.lb.serving.running
                and not any(link.streams for link in self.lb.regions.links)
            )
        )
        for served in fleet.models.values():
            assert served.layers.local._held == served.layers.remote._held == 0
            assert not any(target.outstanding for target in served.targets())

    async def chat(self, text: str = "hello", headers: dict[str, str] | None = None, **fields: Any):
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return await self.post("/v1/chat/completions", body, headers)


@contextlib.asynccontextmanager
async def running_upstreams(
    *servers: FakeServer,
    known: bool = True,
    name: str = "lb-test",
    security: Security = NO_SECURITY,
    clock: Clock = time.monotonic,
    **settings: Any,
):
    for server in servers:
        if server._server is None:
            await server.start()
    registry = CollectorRegistry()
    named = {"upstream": ",".join(server.url for server in servers), "upstream_probe_s": 0.02,
             "upstream_health_s": 0.05, "access_log": False}  # fmt: skip
    context = ServiceContext("lb", name, Telemetry("lb", name), registry, asyncio.Event(), security)
    lb = UpstreamLb(LbSettings(**(named | settings)), context, clock)
    bench = Bench(lb, list(servers), registry)
    try:
        bench.endpoints.update(await lb.start())
        if known:
            await bench.known()
        yield bench
    finally:
        await lb.close(0)
        for server in servers:
            await server.stop()
