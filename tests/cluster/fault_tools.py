"""Actions of the fault tests on a cluster from outside: load, wait, look, break and mend."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from launch.cluster import LocalCluster
from launch.process import Child, ServiceProcess
from launch.scrape import Scrape
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.lb.v1 import lb_pb2_grpc
from pinyon.core.block_keys import chain_block_keys, namespace, pack_keys, tokens_to_bytes
from pinyon.core.layout import KvLayout
from pinyon.frontdoor.auth import PUBLIC
from tests.cluster.asking import complete
from tests.cluster.observe import wait_idle
from tests.cluster.reference import BLOCK_TOKENS, Answer, Ask, Reference, random_sampling, send, text_tokens
from tests.waiting import WAIT_S, eventually

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
INSTANCES = len(WORKERS) + 1


class Clients:
    """Requests under way on one channel to the load balancer."""

    def __init__(self, stub: lb_pb2_grpc.LbServiceStub, reference: Reference) -> None:
        self.stub = stub
        self._reference = reference
        self._running: list[tuple[Ask, Answer, asyncio.Task[Answer]]] = []

    def start(self, asks: list[Ask]) -> list[Answer]:
        """Sends all requests at once; the answers grow as tokens arrive."""
        answers = [Answer() for _ in asks]
        for ask, answer in zip(asks, answers, strict=True):
            self._running.append((ask, answer, asyncio.create_task(send(self.stub, ask, answer))))
        return answers

    async def exact(self) -> None:
        """Waits until all requests have ended in time and without an error, and compares their tokens."""
        running, self._running = self._running, []
        # The expected tokens are computed while the cluster works (or waits for a frozen process).
        asks = [ask for ask, _, _ in running]
        expecting = asyncio.get_running_loop().run_in_executor(None, self._reference.all_tokens, asks)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*(task for _, _, task in running))
        finally:
            expected = await expecting  # outside the timeout, as this computation is not part of the wait
        wrong = [number for number, (_, answer, _) in enumerate(running) if answer.tokens != expected[number]]
        assert not wrong, f"requests {wrong} of {len(running)} got other tokens than without faults"

    @property
    def tasks(self) -> list[asyncio.Task[Answer]]:
        """The tasks of the requests under way."""
        return [task for _, _, task in self._running]

    @property
    def waiting(self) -> bool:
        """True while a request that was started has not ended."""
        return any(not task.done() for task in self.tasks)

    async def end(self) -> None:
        for _, _, task in self._running:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in self._running), return_exceptions=True)
        self._running.clear()


@contextlib.asynccontextmanager
async def clients_of(cluster: LocalCluster, reference: Reference) -> AsyncIterator[Clients]:
    async with cluster.access.channel(cluster.services["lb-0"], kind=grpc.aio) as channel:
        clients = Clients(lb_pb2_grpc.LbServiceStub(channel), reference)
        yield clients
        await clients.end()


def make_asks(random_: random.Random, count: int, prompt_tokens: int, max_tokens: int) -> list[Ask]:
    return [
        Ask(tuple(text_tokens(random_, prompt_tokens + number)), random_sampling(random_, max_tokens))
        for number in range(count)
    ]


def again(random_: random.Random, asks: list[Ask], max_tokens: int = 8) -> list[Ask]:
    """Returns the same prompts with other sampling: they reuse the KV kept for them and expose any damage to it."""
    return [Ask(ask.prompt, random_sampling(random_, max_tokens)) for ask in asks]


async def value(cluster: LocalCluster, service: str, metric: str) -> float:
    return (await asyncio.to_thread(Scrape, cluster, (service,), (metric,))).total(metric, service)


async def reads(cluster: LocalCluster, service: str, metric: str, expected: float) -> bool:
    return await value(cluster, service, metric) == expected


async def busiest(
    cluster: LocalCluster, kind: str, metric: str, clients: Clients, begin: Callable[[], Awaitable[object]]
) -> ServiceProcess:
    """Returns the instance of this kind with most of ``metric``, once one has any; ``begin`` (re)sends the requests."""
    found: list[ServiceProcess] = []

    async def some() -> bool:
        if not clients.waiting:
            await begin()
        names = [each.name for each in cluster.of_kind(kind)]
        scrape = await asyncio.to_thread(Scrape, cluster, names, (metric,))
        best = max(cluster.of_kind(kind), key=lambda each: scrape.total(metric, each.name))
        found[:] = [best]
        return scrape.total(metric, best.name) > 0

    await eventually(some, f"{kind} with {metric}")
    return found[0]


async def generating(answers: list[Answer], tokens: int = 3) -> None:
    """Waits until each answer has this many tokens. Callers ask for many more, so that no answer ends meanwhile."""
    await eventually(lambda: all(len(answer.tokens) >= tokens for answer in answers), "tokens of all streams")


async def restart(cluster: LocalCluster, name: str) -> None:
    # A child ends with the thread that started it, and this thread lives on.
    service = cluster.services[name]
    service.start_again()
    await asyncio.to_thread(service.wait_ready, time.monotonic() + WAIT_S)


async def known(cluster: LocalCluster, count: int = INSTANCES) -> None:
    await asyncio.to_thread(cluster.wait_instances, count, time.monotonic() + WAIT_S)


async def used(cluster: LocalCluster, clients: Clients, random_: random.Random, name: str, metric: str) -> None:
    """Waits until the (restarted) instance gets work again."""

    async def gets_work() -> bool:
        clients.start(make_asks(random_, 4, 100, 4))
        await clients.exact()
        return await value(cluster, name, metric) > 0

    await eventually(gets_work, f"{name} is used again")


async def whole(cluster: LocalCluster) -> None:
    """Waits until nothing is under way or left, and checks that every block of every pool is accounted for."""
    await wait_idle(cluster)
    scrape = await asyncio.to_thread(Scrape, cluster, WORKERS)
    for name in WORKERS:
        parts = [scrape.total(f"pinyon_worker_{part}_blocks", name) for part in ("used", "cached", "free")]
        assert sum(parts) == scrape.total("pinyon_worker_total_blocks", name), f"{name}: used, cached, free are {parts}"


def instances_of(cluster: LocalCluster) -> list[conductor_pb2.Instance]:
    """Returns the instances that the conductor knows."""
    with cluster.access.channel(cluster.services["conductor"]) as channel:
        stub = conductor_pb2_grpc.ConductorServiceStub(channel)
        return list(stub.ListInstances(conductor_pb2.ListInstancesRequest(), timeout=WAIT_S).instances)


def lookup(cluster: LocalCluster, prompt: tuple[int, ...]) -> dict[str, int]:
    """Returns the prompt's leading blocks by holder, according to the conductor's index."""
    info = next((each.info for each in instances_of(cluster) if each.info.model), None)
    if info is None:
        return {}
    shape = info.layout
    layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, shape.block_tokens, shape.dtype)
    start = namespace(info.model_fingerprint, layout.layout_id, PUBLIC.tenant, cluster.access.secret)
    keys = chain_block_keys(start, tokens_to_bytes(prompt), BLOCK_TOKENS)
    with cluster.access.channel(cluster.services["conductor"]) as channel:
        stub = conductor_pb2_grpc.ConductorServiceStub(channel)
        reply = stub.LookupBlocks(conductor_pb2.LookupBlocksRequest(block_keys=pack_keys(keys)), timeout=WAIT_S)
    return {holder.instance_id: holder.prefix_blocks for holder in reply.holders}


def redis_process(cluster: LocalCluster) -> Child:
    assert cluster.redis is not None
    assert cluster.redis.process is not None
    return cluster.redis.process


def kill_redis(cluster: LocalCluster) -> None:
    process = redis_process(cluster)
    process.kill()
    process.wait(timeout=WAIT_S)


def start_redis(cluster: LocalCluster) -> None:
    """Starts Redis again, empty, at the same address."""
    assert cluster.redis is not None
    cluster.redis.start()


def exit_status(service: ServiceProcess) -> int | None:
    return None if service.process is None else service.process.poll()


def http_accepts(cluster: LocalCluster) -> bool:
    """Returns whether the HTTP side takes a new completion; an answer other than yes, a 503 or a refusal fails."""
    try:
        status = complete(cluster, max_tokens=1).status
    except OSError:
        return False
    assert status in (200, 503), f"HTTP {status}"
    return status == 200
