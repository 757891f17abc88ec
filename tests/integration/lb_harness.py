"""A load balancer in this process between a hand-written conductor and workers, with switches for faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import psutil
from grpc_health.v1 import health, health_pb2_grpc
from prometheus_client import CollectorRegistry

from launch.ports import HeldPorts
from launch.process import ServiceProcess
from pinyon import __version__
from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.core.compiled import compiled
from pinyon.core.logprobs import TokenLogprob
from pinyon.messages.instance import layout_to_proto
from pinyon.model import load_card
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from services.lb.app import Lb
from services.lb.settings import LbSettings
from tests.forks import forked
from tests.http_client import Connection, Reply
from tests.idle import left_in
from tests.sent_logprobs import logprobs_to_proto

MODEL = "pinyon-tiny"
VERSION = {"version": __version__, "compiled": compiled(), "python": platform.python_version()}
"""The answer to ``GET /version`` of a load balancer that runs the same modules as the tests."""
WAIT_S = 60.0
"""The longest wait, which only ends what hangs."""
BLOCK_TOKENS = 32
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # As real services set it; otherwise a session that is silent for a while ends by GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def port_of(owner: object) -> int:
    """Takes a port on which ``owner`` may stop and listen again; nobody else gets it while ``owner`` exists."""
    ports = HeldPorts()
    weakref.finalize(owner, ports.close)
    return ports.take("127.0.0.1")


def expected_text(prompt_tokens: int, count: int, start: int = 0) -> str:
    """Returns what a fake worker generates; by contract it depends only on the prompt's length and the index."""
    return "".join(chr(97 + (prompt_tokens * 7 + index * 5) % 26) for index in range(start, count))


def expected_logprobs(tokens, top: int) -> list[TokenLogprob]:
    """Returns a fake worker's log-probabilities of tokens, with the ``top`` likeliest ones each."""
    return [TokenLogprob(-token / 64, tuple((token + n, -n / 4) for n in range(top))) for token in tokens]


class FakeService:
    """A gRPC server that can be stopped and started again at its port."""

    add: Callable[[Any, grpc.aio.Server], None]

    def __init__(self) -> None:
        self.address = ""
        self.changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        type(self).add(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self._server)
        self.address = f"127.0.0.1:{port or port_of(self)}"
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(condition)


class FakeWorker(FakeService, worker_pb2_grpc.WorkerServiceServicer):
    """A worker that generates at once; ``hold`` stops it before tokens, ``die_at`` breaks sessions at that token."""

    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.boot = "1"
        self.schedulable = True
        self.fingerprint = load_card().fingerprint
        self.submissions: list[worker_pb2.Submission] = []
        self.cancelled: list[int] = []
        self.open: set[int] = set()
        self.go = asyncio.Event()
        self.go.set()
        self.hold_after = 0
        """The number of tokens that are generated although ``go`` is not set."""
        self.die_at = -1
        self.error: common_pb2.Error | None = None
        self.per_update = 1
        self.tells_logprobs = True
        self.logprobs_of: Callable[[Sequence[int], int], list[TokenLogprob]] = expected_logprobs
        self.says: Sequence[tuple[str, int]] = ()
        """Texts with their tokens that it generates for any prompt; if empty, ``expected_text``."""
        self.padding = ""
        """Text added to each update."""

    def hold(self, after: int = 0) -> Self:
        """Stops each request after so many tokens, until ``go`` is set."""
        self.go.clear()
        self.hold_after = after
        return self

    async def Session(self, requests, context):
        running: dict[int, asyncio.Task] = {}
        lock = asyncio.Lock()
        broken = asyncio.Event()

        async def send(update: worker_pb2.StreamUpdate) -> None:
            async with lock:
                await context.write(worker_pb2.SessionResponse(updates=[update]))

        async def read() -> None:
            async for message in requests:
                for submission in message.submissions:
                    self.submissions.append(submission)
                    self.open.add(submission.stream_id)
                    task = asyncio.create_task(self._generate(submission, send, broken))
                    running[submission.stream_id] = task
                for stream_id in message.cancel_stream_ids:
                    self.cancelled.append(stream_id)
                    self.open.discard(stream_id)
                    running[stream_id].cancel()
                await self.note()

        reader = asyncio.create_task(read())
        breaker = asyncio.create_task(broken.wait())
        try:
            await asyncio.wait({reader, breaker}, return_when=asyncio.FIRST_COMPLETED)
            if broken.is_set():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "died")
        finally:
            tasks = [reader, breaker, *running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.open.clear()
            await self.note()

    async def _generate(self, submission, send, broken) -> None:
        count = len(submission.prompt_tokens_le32) // 4
        base, done = count - submission.generated_tokens, submission.generated_tokens
        replay = expected_text(base, done)
        limit = submission.sampling.max_tokens
        error = self.error
        if submission.model_fingerprint not in ("", self.fingerprint):
            error = common_pb2.Error(code="FAILED_PRECONDITION", message="other weights")
        if error is not None:
            reason = common_pb2.FINISH_REASON_ERROR
            await send(worker_pb2.StreamUpdate(stream_id=submission.stream_id, finish_reason=reason, error=error))
            self.open.discard(submission.stream_id)
            return
        first = True
        while done < limit:
            if done >= self.hold_after:
                await self.go.wait()
            if 0 <= self.die_at <= done:
                broken.set()
                return
            step = min(self.per_update, limit - done)
            text, tokens = self._made(base, done, done + step)
            text, replay = replay + text + self.padding, ""
            update = worker_pb2.StreamUpdate(stream_id=submission.stream_id, text=text, tokens=tokens)
            sampling = submission.sampling
            if sampling.HasField("logprobs") and self.tells_logprobs:
                update.logprobs.CopyFrom(logprobs_to_proto(self.logprobs_of(tokens, sampling.logprobs)))
            if first:
                first = False
                if sampling.prompt_logprobs:
                    prompt = np.frombuffer(submission.prompt_tokens_le32, "<u4").tolist()
                    told = self.logprobs_of(prompt[1:], sampling.logprobs)
                    update.prompt_logprobs.CopyFrom(logprobs_to_proto(told))
                update.prefill.prefill_instance_id = submission.placement.prefill_instance_id
                update.prefill.computed_tokens = count
            done += step
            if done == limit:
                update.finish_reason = common_pb2.FINISH_REASON_LENGTH
                update.usage.prompt_tokens = base
                update.usage.completion_tokens = limit
                update.usage.cached_tokens = min(base, BLOCK_TOKENS)
                update.usage.cached_local_tokens = min(base, BLOCK_TOKENS)
                self.open.discard(submission.stream_id)
            await send(update)
        await self.note()

    def _made(self, prompt_tokens: int, start: int, end: int) -> tuple[str, list[int]]:
        if self.says:
            said = self.says[start:end]
            return "".join(text for text, _ in said), [token for _, token in said]
        text = expected_text(prompt_tokens, end, start)
        return text, [ord(char) for char in text]


class FakeConductor(FakeService, conductor_pb2_grpc.ConductorServiceServicer):
    """A conductor that places all on the first worker not excluded; ``silent`` stops answers, ``error`` is for all."""

    add = conductor_pb2_grpc.add_ConductorServiceServicer_to_server

    def __init__(self, workers: list[FakeWorker]) -> None:
        super().__init__()
        self.workers = workers
        self.requests: list[conductor_pb2.ScheduleRequest] = []
        self.released: list[str] = []
        self.messages = 0
        self.silent = False
        self.late = asyncio.Event()
        """The event that answers wait for."""
        self.late.set()
        self.error: common_pb2.Error | None = None
        self.prefill: FakeWorker | None = None
        self.incomplete = False
        self._pushes: set[asyncio.Event] = set()
        self._version = 0

    def push(self, workers: list[FakeWorker] | None = None) -> None:
        """Sends the instance list again, from now on with these ``workers``."""
        self.workers = self.workers if workers is None else workers
        for event in self._pushes:
            event.set()

    def instances(self) -> conductor_pb2.InstanceList:
        self._version += 1
        layout = layout_to_proto(load_card().config.kv_layout(BLOCK_TOKENS))
        return conductor_pb2.InstanceList(
            version=self._version,
            incomplete=self.incomplete,
            instances=[
                conductor_pb2.Instance(
                    info=conductor_pb2.InstanceInfo(
                        instance_id=worker.name,
                        boot_id=worker.boot,
                        role=common_pb2.ROLE_MIXED,
                        address=worker.address,
                        model=MODEL,
                        model_fingerprint=worker.fingerprint,
                        layout=layout,
                        max_batch=8,
                        max_context_tokens=4096,
                    ),
                    schedulable=worker.schedulable,
                )
                for worker in self.workers
            ],
        )

    async def ScheduleSession(self, requests, context):
        pushed = asyncio.Event()
        self._pushes.add(pushed)
        lock = asyncio.Lock()

        async def push() -> None:
            while True:
                async with lock:
                    await context.write(conductor_pb2.ScheduleSessionResponse(instances=self.instances()))
                await pushed.wait()
                pushed.clear()

        pusher = asyncio.create_task(push())
        try:
            async for message in requests:
                self.messages += 1
                self.requests += message.requests
                self.released += message.released_request_ids
                await self.note()
                if message.requests:
                    await self.late.wait()
                if message.requests and not self.silent:
                    responses = [self._answer(request) for request in message.requests]
                    async with lock:
                        await context.write(conductor_pb2.ScheduleSessionResponse(responses=responses))
        finally:
            self._pushes.discard(pushed)
            pusher.cancel()
            await asyncio.gather(pusher, return_exceptions=True)

    def _answer(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleResponse:
        if self.error is not None:
            return conductor_pb2.ScheduleResponse(request_id=request.request_id, error=self.error)
        left = [worker for worker in self.workers if worker.name not in request.exclude_instance_ids]
        if not left:
            error = common_pb2.Error(code="UNAVAILABLE", message="all are excluded", retry_after_ms=1000)
            return conductor_pb2.ScheduleResponse(request_id=request.request_id, error=error)
        decode = left[0]
        prefill = self.prefill if self.prefill in left else decode
        return conductor_pb2.ScheduleResponse(
            request_id=request.request_id,
            placement=common_pb2.Placement(
                prefill_instance_id=prefill.name,
                prefill_address=prefill.address,
                decode_instance_id=decode.name,
                decode_address=decode.address,
                policy="fake",
            ),
        )


async def spin(condition, timeout_s: float = WAIT_S) -> None:
    """Runs the loop until ``condition``, where there is no event, such as for a gauge."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def ask(prompt: object = "hello", size: int = 0, **fields) -> bytes:
    """Returns the body of a request for a completion, padded to ``size`` bytes with spaces, which JSON ignores."""
    return json.dumps({"model": MODEL, "prompt": prompt, **fields}).encode().ljust(size)


class Front:
    """A load balancer's HTTP side."""

    @property
    def http(self) -> str:
        raise NotImplementedError

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with Connection(self.http) as connection:
            connection.send("POST", path, raw, headers)
            return await connection.reply()

    async def complete(self, prompt: object = "hello", headers: dict[str, str] | None = None, **fields) -> Reply:
        return await self.post("/v1/completions", ask(prompt, **fields), headers)

    @contextlib.asynccontextmanager
    async def asking(self, prompt: object = "hello", **fields):
        """Yields the connection of a client that has asked for a completion."""
        async with Connection(self.http) as connection:
            connection.send("POST", "/v1/completions", ask(prompt, **fields))
            yield connection

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        async with Connection(self.http) as connection:
            connection.send("GET", path, None, headers)
            return await connection.reply()


@dataclass
class Bench(Front):
    """The load balancer with its workers and conductor."""

    lb: Lb
    conductor: FakeConductor
    workers: list[FakeWorker]
    registry: CollectorRegistry
    endpoints: dict[str, str] = field(default_factory=dict)
    clock: Clock = time.monotonic

    @property
    def http(self) -> str:
        return self.endpoints["http"]

    async def connected(self) -> None:
        """Waits until the load balancer knows instances."""
        async with asyncio.timeout(WAIT_S):
            while not (self.lb.conductor.connected and self.lb.view.servable(MODEL, self.clock())):
                await self.lb.view.wait_change(0.05)

    def gauge(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"pinyon_lb_{name}", labels)
        assert value is not None, name
        return value

    def leftovers(self) -> dict[str, float]:
        return left_in("lb", self.gauge)

    async def held(self, prompt: str = "hello", after: int = 0, **fields) -> asyncio.Future[Reply]:
        """Starts a request, which the first worker holds after so many tokens, until its ``go`` is set."""
        worker = self.workers[0].hold(after)
        running = asyncio.ensure_future(self.complete(prompt, **fields))
        await worker.until(lambda: worker.open)
        return running

    async def lose_conductor(self) -> None:
        await self.conductor.stop()
        await spin(lambda: not self.lb.conductor.connected)

    async def idle(self) -> None:
        """Waits until nothing of any request is left."""
        await spin(lambda: not self.leftovers() and not any(worker.open for worker in self.workers))


@contextlib.asynccontextmanager
async def running_lb(
    workers: int = 2, *, conductor: bool = True, clock: Clock = time.monotonic, name: str = "lb-test", **settings
):
    fakes = [FakeWorker(f"w{index}") for index in range(workers)]
    for fake in fakes:
        await fake.start()
    fake_conductor = FakeConductor(fakes)
    await fake_conductor.start()
    registry = CollectorRegistry()
    named = {"conductor": fake_conductor.address if conductor else "", "conductor_timeout_s": WAIT_S}
    context = ServiceContext("lb", name, Telemetry("lb", name), registry, asyncio.Event())
    lb = Lb(LbSettings(**named | settings), context, clock)
    bench = Bench(lb, fake_conductor, fakes, registry, clock=clock)
    try:
        bench.endpoints.update(await lb.start())
        if conductor:
            await bench.connected()
        yield bench
    finally:
        await lb.close(0)
        await fake_conductor.stop()
        for fake in fakes:
            await fake.stop()


@dataclass
class LiveLb(Front):
    """A load balancer in its own process; conductor and workers are in this one."""

    process: ServiceProcess
    conductor: FakeConductor
    workers: list[FakeWorker]

    @property
    def http(self) -> str:
        return self.process.endpoints["http"]

    @property
    def memory_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    async def gauge(self, name: str) -> float:
        text = (await self.get("/metrics")).body.decode()
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"pinyon_lb_{name} ")))

    async def idle(self) -> None:
        """Waits until nothing of any request is left."""
        async with asyncio.timeout(WAIT_S):
            while await self.gauge("in_flight_requests") or any(worker.open for worker in self.workers):  # noqa: ASYNC110 - a process has no event for us
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def live_lb(folder: Path, **settings):
    worker = FakeWorker("w0")
    await worker.start()
    conductor = FakeConductor([worker])
    await conductor.start()
    settings = {"conductor": conductor.address, "http_listen": "127.0.0.1:0", "lame_duck_s": 0, "drain_s": 0} | settings
    arguments = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    process = ServiceProcess("lb", "services.lb", arguments, folder / "lb.log", forked)
    process.spawn()
    lb = LiveLb(process, conductor, [worker])
    try:
        await asyncio.to_thread(process.wait_ready, time.monotonic() + WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while (await lb.get("/health/ready")).status != 200:  # noqa: ASYNC110 - a process has no event for us
                await asyncio.sleep(0.01)
        yield lb
    finally:
        process.kill()
        await conductor.stop()
        await worker.stop()


def tokens(text: str) -> bytes:
    return np.frombuffer(text.encode(), np.uint8).astype("<u4").tobytes()
