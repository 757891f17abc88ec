"""The store under faults of real processes while clients keep putting and reading.

Redis is killed, emptied, frozen, and replaced by one that lost half of the entries; two nodes are killed and started
again, one is frozen."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from launch.process import ServiceProcess
from launch.redis_server import RedisServer, find_redis
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import PinyonError, Unavailable
from pinyon.store.writer import PutOutcome
from tests.forks import forked
from tests.integration.kvstore_parts import OBJECT, Client, client_of, end_redis, key
from tests.waiting import eventually

pytestmark = pytest.mark.slow

NODES = 4
NUMBERS = 200
"""The number of objects, half of what the nodes have room for, so nothing is evicted."""
CALL_S = 2.0
"""The time limit of a put or get, in seconds."""
START_S = 60.0
HUNG_S = 30.0
"""Seconds far above what a put or get may take, even on a busy machine."""


class Suite:
    """Redis and the nodes, and the faults that hit them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis: RedisServer = find_redis()
        self.rng = random.Random(11)
        self.nodes: dict[str, ServiceProcess] = {}
        for number in range(NODES):
            self._start(f"kv-{number}")

    def _start(self, node_id: str) -> ServiceProcess:
        arguments = ["--instance-id", node_id, "--redis-url", self.redis.url, "--pool-mib", str(NUMBERS * OBJECT >> 19)]
        arguments += ["--metrics-listen", "", "--node-lease-s", "3"]
        node = ServiceProcess(node_id, "services.kvstore", arguments, self.folder / node_id, forked)
        self.nodes[node_id] = node
        node.spawn()
        return node

    def wait_ready(self) -> None:
        for node in self.nodes.values():
            node.wait_ready(time.monotonic() + START_S)

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self.redis.close()

    # -- faults

    async def redis_is_killed_and_comes_back_empty(self) -> None:
        await self._restart_redis()

    async def _restart_redis(self) -> None:
        await end_redis(self.redis)
        await asyncio.to_thread(self.redis.start)

    async def redis_is_emptied(self) -> None:
        async with Redis.from_url(self.redis.url) as raw:
            await raw.flushall()

    async def redis_is_replaced_by_one_that_lost_half(self) -> None:
        """Replaces Redis by one with the nodes' records and half of the entries of their tables."""
        async with Redis.from_url(self.redis.url) as raw:
            saved = [(name, await raw.dump(name), await raw.pttl(name)) for name in sorted(await raw.keys())]
        await self._restart_redis()
        async with Redis.from_url(self.redis.url) as raw:
            for name, value, left_ms in saved:
                if value is not None:
                    await raw.restore(name, max(0, left_ms), value, replace=True)
            tables = [name for name, _, _ in saved if name.endswith(b":blocks")]
            entries = [(name, key) for name in tables for key in await raw.hkeys(name)]
            assert entries, "no node lists anything"
            for name, key in self.rng.sample(entries, -(-len(entries) // 2)):
                await raw.hdel(name, key)

    async def redis_is_frozen(self) -> None:
        assert self.redis.process is not None
        await self._frozen(self.redis.process.send_signal)

    async def a_node_is_frozen(self) -> None:
        process = self.nodes["kv-2"].process
        assert process is not None
        await self._frozen(process.send_signal)

    @staticmethod
    async def _frozen(send: Callable[[int], None]) -> None:
        send(signal.SIGSTOP)
        try:
            await asyncio.sleep(4)  # the fault lasts this long
        finally:
            send(signal.SIGCONT)

    async def two_nodes_are_killed_and_started_again(self) -> None:
        for node_id in ("kv-0", "kv-1"):
            self.nodes[node_id].kill()
        again = [await asyncio.to_thread(self._start, node_id) for node_id in ("kv-0", "kv-1")]
        for node in again:
            await asyncio.to_thread(node.wait_ready, time.monotonic() + START_S)


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    suite = Suite(tmp_path)
    try:
        suite.wait_ready()
        yield suite
    finally:
        suite.close()


def new_client(suite: Suite) -> AbstractAsyncContextManager[Client]:
    """Returns a client like a worker's: Redis gets a second for an answer."""
    return client_of(suite.redis.url, 4, redis_timeout_s=1.0)


class Load:
    """Puts and reads of random objects, with checks of what arrives, while the context lasts."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.worst_s = 0.0

    async def _once(self) -> None:
        numbers = self.rng.sample(range(NUMBERS), 4)
        start_s = time.monotonic()
        try:
            if self.rng.random() < 0.5:
                result = await self.client.store.put(self.client.fill(numbers), OBJECT, CALL_S)
                self.counts.update(outcome.value for outcome in result)
            else:
                arrived = await self.client.get(numbers, CALL_S)
                self.counts.update("hit" if whole else "miss" for whole in arrived)
        except Unavailable:
            self.counts["unavailable"] += 1
        self.worst_s = max(self.worst_s, time.monotonic() - start_s)

    async def _run(self) -> None:
        while True:
            await self._once()
            await asyncio.sleep(0.01)  # the pace of the load

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()


async def _listed_as_held(suite: Suite, client: Client) -> bool:
    """Returns whether Redis names each node for exactly as many objects as the node has."""
    stub, asked = kvstore_pb2_grpc.KvStoreServiceStub, kvstore_pb2.GetNodeStatusRequest()
    try:
        nodes = await client.store.metadata.nodes()
        located = await client.store.metadata.locate([key(number) for number in range(NUMBERS)])
        listed = Counter(replica.node.node_id for replicas in located for replica in replicas)
        held = {}
        for node in nodes:
            status = await client.channels.call(node.address, stub, "GetNodeStatus", asked, CALL_S)
            held[node.node_id] = status.objects
    except PinyonError:
        return False
    return len(held) == NODES and held == {node_id: listed[node_id] for node_id in held}


FAULTS: list[Callable[[Suite], Awaitable[None]]] = [
    Suite.redis_is_killed_and_comes_back_empty,
    Suite.redis_is_emptied,
    Suite.redis_is_replaced_by_one_that_lost_half,
    Suite.redis_is_frozen,
    Suite.two_nodes_are_killed_and_started_again,
    Suite.a_node_is_frozen,
]


async def test_the_store_recovers_from_every_fault_while_it_is_used(suite: Suite) -> None:
    async with new_client(suite) as one, new_client(suite) as other:
        loads = [Load(client, seed) for seed, client in enumerate((one, other))]

        async def all_stored() -> bool:
            """Puts every object, reads all, and returns whether every object arrived."""
            try:
                for start in range(0, NUMBERS, 4):
                    await other.store.put(other.fill(range(start, start + 4)), OBJECT, CALL_S)
                arrived = [await other.get(range(start, start + 4)) for start in range(0, NUMBERS, 4)]
            except Unavailable:
                return False
            return all(all(each) for each in arrived)

        await eventually(all_stored, "everything is stored")
        for fault in FAULTS:
            async with loads[0].running():
                await fault(suite)
                await eventually(lambda: _listed_as_held(suite, one), f"entries are true after {fault.__name__}")
            await eventually(all_stored, f"everything is stored after {fault.__name__}")
            async with loads[0].running(), loads[1].running():
                before = Counter(loads[0].counts)
                await eventually(lambda: loads[0].counts["hit"] > before["hit"] + 20, "reads go on")  # noqa: B023
            assert loads[0].worst_s < HUNG_S
            print(f"{fault.__name__}: worst call {loads[0].worst_s:.1f} s, {dict(loads[0].counts)}")
            loads[0].worst_s = 0.0
        assert loads[0].counts[PutOutcome.STORED.value]
