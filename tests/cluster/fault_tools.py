"""What the fault tests do with a cluster from outside: load, wait, look, break and mend."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Awaitable, Callable

from launch.cluster import LocalCluster
from launch.process import ServiceProcess
from launch.scrape import Scrape
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.lb.v1 import lb_pb2_grpc
from pinyon.core.block_keys import chain_block_keys, namespace, pack_keys, tokens_to_bytes
from pinyon.core.layout import KvLayout
from pinyon.frontdoor.auth import PUBLIC
from tests.cluster.observe import wait_idle
from tests.cluster.reference import BLOCK_TOKENS, Answer, Ask, Reference, random_sampling, send, text_tokens

WAIT_S = 90.0
"""Longest wait for anything: far above what is needed, far below a request's own two minutes."""
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
INSTANCES = len(WORKERS) + 1


class Clients:
    """Requests under way on one channel to the load balancer."""

    def __init__(self, stub: lb_pb2_grpc.LbServiceStub, reference: Reference) -> None:
        self.stub = stub
        self._reference = reference
        self._running: list[tuple[Ask, Answer, asyncio.Task[Answer]]] = []

    def start(self, asks: list[Ask]) -> list[Answer]:
        """Send them all at once; the answers grow."""
        answers = [Answer() for _ in asks]
        for ask, answer in zip(asks, answers, strict=True):
            self._running.append((ask, answer, asyncio.create_task(send(self.stub, ask, answer))))
        return answers

    async def exact(self) -> None:
        """All that was started ends in time and without an error, with the right tokens."""
        running, self._running = self._running, []
        # What is expected is computed while the cluster works (or waits for a frozen process).
        asks = [ask for ask, _, _ in running]
        expecting = asyncio.get_running_loop().run_in_executor(None, self._reference.all_tokens, asks)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*(task for _, _, task in running))
        finally:
            expected = await expecting  # it takes what it takes: it is not what is timed
        wrong = [number for number, (_, answer, _) in enumerate(running) if answer.tokens != expected[number]]
        assert not wrong, f"requests {wrong} of {len(running)} got other tokens than without faults"

    @property
    def tasks(self) -> list[asyncio.Task[Answer]]:
        """Of what was started."""
        return [task for _, _, task in self._running]

    @property
    def waiting(self) -> bool:
        """Something that was started has not ended."""
        return any(not task.done() for task in self.tasks)

    async def end(self) -> None:
        for _, _, task in self._running:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in self._running), return_exceptions=True)
        self._running.clear()


def make_asks(random_: random.Random, count: int, prompt_tokens: int, max_tokens: int) -> list[Ask]:
    return [
        Ask(tuple(text_tokens(random_, prompt_tokens + number)), random_sampling(random_, max_tokens))
        for number in range(count)
    ]


def again(random_: random.Random, asks: list[Ask], max_tokens: int = 8) -> list[Ask]:
    """The same prompts, sampled differently: what was kept of them is used, and seen if it is damaged."""
    return [Ask(ask.prompt, random_sampling(random_, max_tokens)) for ask in asks]


async def until(what: str, true: Callable[[], Awaitable[bool]]) -> None:
    """Poll: processes and their metrics have no event for outsiders."""
    deadline = time.monotonic() + WAIT_S
    while not await true():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.005)


async def value(cluster: LocalCluster, service: str, metric: str) -> float:
    return (await asyncio.to_thread(Scrape, cluster, (service,), (metric,))).of(service, metric)


async def busiest(
    cluster: LocalCluster, kind: str, metric: str, clients: Clients, begin: Callable[[], Awaitable[object]]
) -> ServiceProcess:
    """The instance of this kind with most of ``metric``; waits until there is one with any. ``begin`` makes the clients
    ask, again if all of it had ended before anybody looked."""
    found: list[ServiceProcess] = []

    async def some() -> bool:
        if not clients.waiting:
            await begin()
        names = [each.name for each in cluster.of_kind(kind)]
        scrape = await asyncio.to_thread(Scrape, cluster, names, (metric,))
        best = max(cluster.of_kind(kind), key=lambda each: scrape.of(each.name, metric))
        found[:] = [best]
        return scrape.of(best.name, metric) > 0

    await until(f"{kind} with {metric}", some)
    return found[0]


async def generating(answers: list[Answer], tokens: int = 3) -> None:
    """Until each has this many tokens; it must not have got to its end meanwhile, so ask for many more."""

    async def far() -> bool:
        return all(len(answer.tokens) >= tokens for answer in answers)

    await until("tokens of all streams", far)


async def restart(cluster: LocalCluster, name: str) -> None:
    # Started from this thread, which lives on: a child ends with the thread that started it.
    service = cluster.restart(name, wait=False)
    await asyncio.to_thread(service.wait_ready, time.monotonic() + WAIT_S)


async def known(cluster: LocalCluster, count: int = INSTANCES) -> None:
    await asyncio.to_thread(cluster.wait_instances, count, time.monotonic() + WAIT_S)


async def used(cluster: LocalCluster, clients: Clients, random_: random.Random, name: str, metric: str) -> None:
    """The (restarted) instance gets work again."""

    async def gets_work() -> bool:
        clients.start(make_asks(random_, 4, 100, 4))
        await clients.exact()
        return await value(cluster, name, metric) > 0

    await until(f"{name} is used again", gets_work)


async def whole(cluster: LocalCluster) -> None:
    """Nothing is going on, nothing is left, and every block of every pool is accounted for."""
    await wait_idle(cluster)
    scrape = await asyncio.to_thread(Scrape, cluster, WORKERS)
    for name in WORKERS:
        parts = [scrape.of(name, f"pinyon_worker_{part}_blocks") for part in ("used", "cached", "free")]
        assert sum(parts) == scrape.of(name, "pinyon_worker_total_blocks"), f"{name}: used, cached, free are {parts}"


def lookup(cluster: LocalCluster, prompt: tuple[int, ...]) -> dict[str, int]:
    """Leading blocks of the prompt by holder, as the conductor's index has it."""
    with cluster.access.channel(cluster.services["conductor"]) as channel:
        stub = conductor_pb2_grpc.ConductorServiceStub(channel)
        instances = stub.ListInstances(conductor_pb2.ListInstancesRequest(), timeout=WAIT_S).instances
        info = next((each.info for each in instances if each.info.model), None)
        if info is None:
            return {}
        shape = info.layout
        layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, shape.block_tokens, shape.dtype)
        start = namespace(info.model_fingerprint, layout.layout_id, PUBLIC.tenant, cluster.access.secret)
        keys = chain_block_keys(start, tokens_to_bytes(prompt), BLOCK_TOKENS)
        reply = stub.LookupBlocks(conductor_pb2.LookupBlocksRequest(block_keys=pack_keys(keys)), timeout=WAIT_S)
    return {holder.instance_id: holder.prefix_blocks for holder in reply.holders}


def redis_process(cluster: LocalCluster) -> subprocess.Popen[bytes]:
    assert cluster.redis is not None
    assert cluster.redis.process is not None
    return cluster.redis.process


def kill_redis(cluster: LocalCluster) -> None:
    process = redis_process(cluster)
    process.kill()
    process.wait(timeout=WAIT_S)


def start_redis(cluster: LocalCluster) -> None:
    """Again, empty, where it was."""
    assert cluster.redis is not None
    cluster.redis.start()


def exit_status(service: ServiceProcess) -> int | None:
    return None if service.process is None else service.process.poll()


def http_accepts(cluster: LocalCluster, lb: ServiceProcess) -> bool:
    """Whether the HTTP side takes a new completion; anything but yes, a 503 or a closed door is an error here."""
    connection = cluster.access.http(lb, WAIT_S)
    body = json.dumps({"model": "pinyon-tiny", "prompt": "a", "max_tokens": 1})
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        status = connection.getresponse().status
    except OSError:
        return False
    finally:
        connection.close()
    assert status in (200, 503), f"HTTP {status}"
    return status == 200
