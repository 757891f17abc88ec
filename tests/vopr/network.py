"""The simulated network: gRPC calls as serialised messages that may be lost, late or doubled, between processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from pinyon.messages.error import error_from_status
from pinyon.runtime.interceptors import with_statuses
from tests.vopr.loop import PROCESS, WORLD, Process, SimLoop

DEAD_PEER_S = 1.5
"""The seconds after which keepalive notices a peer that cannot be reached."""


class Network:
    """The network: who reaches whom, how late, and what happens to messages on the way."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loop, self.random = loop, random
        self.servers: dict[str, SimServer] = {}
        self.cut: set[frozenset[str]] = set()
        """Pairs of processes that do not reach each other."""
        self.mean_s = random.choice([0.0003, 0.001, 0.004])
        self.loss = self.doubling = self.slowness = 0.0
        """The shares of messages that are lost, of requests that come twice, and of messages that take long."""
        self.struck: Counter[str] = Counter()
        self.calls: dict[_Call, None] = {}
        """The calls that their callers wait for."""

    def died(self, process: Process) -> None:
        """Breaks the connections of a process that has died."""
        self.servers = {name: each for name, each in self.servers.items() if each.process is not process}
        for call in [each for each in self.calls if process in (each.at, each.me)]:
            call.broken()

    def reaches(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut

    def delay_s(self) -> float:
        if self.slowness and self.random.random() < self.slowness:
            self.struck["message late"] += 1
            return self.random.uniform(0.05, 1.5)
        return self.random.expovariate(1 / self.mean_s)

    def fate(self, one: str, other: str) -> float | None:
        """Returns the seconds that a message takes, or None if it never arrives."""
        if not self.reaches(one, other):
            return None
        if self.loss and self.random.random() < self.loss:
            self.struck["message lost"] += 1
            return None
        return self.delay_s()

    def later(self, delay_s: float, work: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Does something in the world, whatever becomes of the process that asks for it."""
        return self.loop.call_later(delay_s, work, *arguments, context=WORLD)


class SimServer:
    """The gRPC server of a process: what :class:`pinyon.runtime.grpc_server.GrpcServer` is to a service."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self.process: Process = PROCESS.get()
        self.methods: dict[str, tuple[Any, Any, Any]] = {}
        self.taps: list[Callable[[str, Any, Any], None]] = []
        """Functions that see each method's name, its request before it is handled (with None) and then its reply."""

    def add(self, servicer: Any, descriptor: Any, callers: Any = None, doors: Any = None) -> None:
        for method in descriptor.methods:
            path = f"/{descriptor.full_name}/{method.name}"
            own = with_statuses(self._watched(method.name, getattr(servicer, method.name)), path)
            self.methods[path] = own, GetMessageClass(method.input_type).FromString, GetMessageClass(method.output_type)

    def _watched(self, name: str, own: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            for tap in self.taps:
                tap(name, request, None)
            reply = await own(request, context)
            for tap in self.taps:
                tap(name, request, reply)
            return reply

        return call

    async def start(self) -> str:
        self._network.servers[self._address] = self
        return self._address

    async def begin_drain(self) -> None:
        """Does nothing: health is not asked for here."""

    async def drain(self, grace_s: float) -> None:
        if self._network.servers.get(self._address) is self:
            del self._network.servers[self._address]


class _CallContext:
    """The context of a call at its server."""

    def __init__(self, process: Process, end_s: float, written: Any) -> None:
        self._process, self._end_s = process, end_s
        self.status: tuple[Any, str, Any] = (grpc.StatusCode.INTERNAL, "", ())
        self.written = written
        """The last message of a stream."""

    def time_remaining(self) -> float:
        return max(0.0, self._end_s - self._process.loop.time())

    def peer_identities(self) -> None:
        """Returns nothing: there is no TLS."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, message: Any) -> None:
        self.written = message

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = code, details, trailing_metadata
        raise grpc.aio.AbortError


class SimCalls:
    """The calls of one process to an address: what :class:`pinyon.runtime.http2.calls.Http2Calls` is elsewhere."""

    under_way = 0

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address

    async def call(
        self, path: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], request: Any, timeout_s: float
    ) -> Any:
        """Returns the answer; that of a method that streams is its last message."""
        self.under_way += 1
        try:
            return await _Call(self._network, self._address, path, timeout_s).run(encode(request), decode)
        finally:
            self.under_way -= 1

    def close(self) -> None:
        """Does nothing: there are no sockets."""


class _Call:
    """One call under way. Its ends are told apart by ``_answer``: the first one counts."""

    def __init__(self, network: Network, address: str, path: str, timeout_s: float) -> None:
        self._network, self._address, self._path = network, address, path
        self._loop = network.loop
        self._end_s = self._loop.time() + timeout_s
        self.me: Process = PROCESS.get()
        self.at: Process | None = None
        """The process that the request has reached."""
        self._answer: asyncio.Future[bytes] = self._loop.create_future()
        self._serving: list[asyncio.Task[None]] = []

    async def run(self, data: bytes, parse: Callable[[bytes], Any]) -> Any:
        network = self._network
        timer = network.later(self._end_s - self._loop.time(), self._fail, grpc.StatusCode.DEADLINE_EXCEEDED)
        to = network.servers.get(self._address)
        there = self._address if to is None else to.process.name
        delay_s = network.fate(self.me.name, there)
        if delay_s is not None:
            network.later(delay_s, self._arrive, data, True)
            if network.doubling and network.random.random() < network.doubling:
                network.struck["request doubled"] += 1
                network.later(delay_s * network.random.uniform(0.2, 3.0), self._arrive, data, False)
        elif not network.reaches(self.me.name, there):
            network.later(DEAD_PEER_S, self._fail, grpc.StatusCode.UNAVAILABLE)
        network.calls[self] = None
        try:
            return parse(await self._answer)
        finally:  # the server's side ends at its deadline, and soon after the caller has gone
            network.calls.pop(self, None)
            timer.cancel()
            for task in self._serving:
                if not task.done():
                    network.later(network.delay_s(), task.cancel)

    def _fail(self, code: Any, details: str = "simulated", metadata: Any = ()) -> None:
        if not self._answer.done():
            self._answer.set_exception(error_from_status(code.name, details, metadata))

    def _arrive(self, data: bytes, first: bool) -> None:
        server = self._network.servers.get(self._address)
        if server is None or server.process.dead or self._path not in server.methods:
            self._network.later(self._network.delay_s(), self._fail, grpc.StatusCode.UNAVAILABLE)
            return
        self.at = server.process
        task = server.process.spawn(self._serve(server, data, first), "call")
        self._serving.append(task)
        if not server.process.frozen and self._answer.done():  # the caller has gone meanwhile
            task.cancel()

    async def _serve(self, server: SimServer, data: bytes, first: bool) -> None:
        own, parse, nothing = server.methods[self._path]
        context = _CallContext(server.process, self._end_s, nothing())
        try:
            reply = await own(parse(data), context) or context.written
        except grpc.aio.AbortError:
            self._send(first, self._fail, *context.status)
        else:
            self._send(first, self._succeed, reply.SerializeToString())

    def _send(self, first: bool, work: Callable[..., None], *arguments: Any) -> None:
        """Sends an answer. That to a request that came twice is the answer to the first one."""
        server = self._network.servers.get(self._address)
        there = self._address if server is None else server.process.name
        delay_s = self._network.fate(there, self.me.name)
        if first and delay_s is not None:
            self._network.later(delay_s, work, *arguments)

    def _succeed(self, reply: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(reply)

    def broken(self) -> None:
        """Ends a call one of whose sides has died: the other one notices."""
        self._network.calls.pop(self, None)
        self._network.later(self._network.delay_s(), self._fail, grpc.StatusCode.UNAVAILABLE)
        for task in self._serving:
            if not task.done():
                self._network.later(self._network.delay_s(), task.cancel)
