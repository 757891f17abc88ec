"""Store nodes with disks and Redis, killed and frozen at random for a minute, while clients put and read.

Whatever happens, no client gets wrong bytes, or waits longer than it was told. In the end Redis lists what the nodes
hold. The seed is printed; ``PINYON_TEST_SEED`` repeats one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from launch.process import ServiceProcess
from launch.redis_server import RedisServer, find_redis
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import PinyonError
from tests.forks import forked
from tests.integration.kvstore_parts import OBJECT, Client, client_of, content, end_redis, key
from tests.long import usually
from tests.waiting import eventually

DURATION_S = usually(8, long=60)
NODES = 3
CLIENTS = 3
AT_ONCE = 4
NUMBERS = range(600)
"""The objects: more than fit into the nodes' memory, so that they go to the disks and come back."""
TOLD_S = 1.0
"""The time that each call is given."""
CALL_S = 2.0
"""The time after which a call counts as stuck, without the delays of this process itself."""
PAUSES_S = ((0.2, 2.0), (1.0, 4.0))
"""The times between two faults of a node, and of Redis, without which nothing is put."""
LOOK_S = 0.02
START_S = 60.0
STATUS, EXISTS = kvstore_pb2.GetNodeStatusRequest(), kvstore_pb2.ExistsRequest(keys=b"".join(map(key, NUMBERS)))


class Victims:
    """The processes, and what happens to them; each is hit by one fault at a time, several at once."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.redis: RedisServer = find_redis()
        self.counts: Counter[str] = Counter()
        self.nodes = [self._node(folder, f"kv-{number}") for number in range(NODES)]
        for node in self.nodes:
            node.spawn()

    def _node(self, folder: Path, name: str) -> ServiceProcess:
        arguments = ["--instance-id", name, "--redis-url", self.redis.url, "--pool-mib", "8", "--node-lease-s", "1"]
        arguments += ["--disk-dir", str(folder / f"{name}.disk"), "--disk-mib", "32", "--metrics-listen", ""]
        return ServiceProcess(name, "services.kvstore", arguments, folder / f"{name}.log", forked, moves=True)

    def wait_ready(self) -> None:
        for node in self.nodes:
            node.wait_ready(time.monotonic() + START_S)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        self.redis.close()

    async def _frozen(self, send: Callable[[int], None]) -> None:
        send(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.rng.choice([0.1, 0.5, 1.5, 3.0]))  # the fault lasts this long
        finally:
            send(signal.SIGCONT)

    async def _node_killed(self, node: ServiceProcess) -> None:
        await asyncio.to_thread(node.kill)
        node.start_again()
        await asyncio.to_thread(node.wait_ready, time.monotonic() + START_S)

    async def redis_killed(self) -> None:
        await end_redis(self.redis)
        await asyncio.to_thread(self.redis.start)

    async def hit(self, victim: ServiceProcess | RedisServer, until_s: float) -> None:
        """Kills and freezes one process again and again; when it returns, the process runs."""
        turn = 0 if victim is self.redis else self.rng.randrange(3)
        while time.monotonic() < until_s:
            await asyncio.sleep(self.rng.uniform(*PAUSES_S[victim is self.redis]))  # the pace of the faults
            what = ("killed", "frozen", "frozen")[turn % 3]
            turn += 1
            self.counts[f"{victim} {what}"] += 1
            if what == "frozen":
                assert victim.process is not None
                await self._frozen(victim.process.send_signal)
            elif isinstance(victim, RedisServer):
                await self.redis_killed()
            else:
                await self._node_killed(victim)


class Delays:
    """The delays of this process itself, which are no fault of the store."""

    def __init__(self) -> None:
        self.sum_s = 0.0

    async def watch(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)  # what takes longer is a delay
            self.sum_s += time.monotonic() - before_s - LOOK_S


class Load:
    """Puts and reads of random objects by one client; each call is timed, and all that arrives is compared."""

    def __init__(self, client: Client, seed: int, delays: Delays) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.delays = delays
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, float] = {}

    async def _timed(self, name: str, call: Callable[[], object]) -> object:
        """Makes a call, and returns its answer or None if it fails."""
        began_s, delayed_s = time.monotonic(), self.delays.sum_s
        try:
            return await call()  # type: ignore[misc]
        except PinyonError as error:
            self.counts[f"{name} {type(error).__name__}"] += 1
            return None
        finally:
            took_s = time.monotonic() - began_s - (self.delays.sum_s - delayed_s)
            self.worst[name] = max(self.worst.get(name, 0.0), took_s)

    async def put(self, numbers: list[int]) -> None:
        put = partial(self.client.store.put, self.client.fill(numbers), OBJECT, TOLD_S)
        outcomes = await self._timed("put", put)
        self.counts.update(f"put {each.value}" for each in outcomes or ())  # type: ignore[attr-defined]

    async def get(self, numbers: list[int]) -> None:
        client, keys = self.client, [key(each) for each in numbers]
        runs = await self._timed("look up", partial(client.store.leading, keys, OBJECT, TOLD_S))
        at = 0
        for node, count in runs or ():  # type: ignore[attr-defined]
            client.memory[:] = bytes(len(client.memory))
            part, places = keys[at : at + count], [client.kv.pieces(slot) for slot in range(count)]
            read = await self._timed("get", partial(client.reader.read, node.address, part, places, OBJECT, TOLD_S))
            arrived = read.leading if read else 0  # type: ignore[attr-defined]
            for slot in range(arrived):
                assert client.slot(slot) == content(numbers[at + slot]), f"object {numbers[at + slot]} is another one"
            self.counts["get hit"] += arrived
            self.counts["get miss"] += count - arrived
            at += count

    async def run(self) -> None:
        while True:
            numbers = self.rng.sample(NUMBERS, AT_ONCE)
            await (self.put if self.rng.random() < 0.4 else self.get)(numbers)
            await asyncio.sleep(0.002)  # the pace of the load


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("PINYON_TEST_SEED", "") or time.time_ns() % (1 << 32))


@pytest.fixture
def victims(tmp_path: Path, seed: int) -> Iterator[Victims]:
    victims = Victims(tmp_path, seed)
    try:
        victims.wait_ready()
        yield victims
    finally:
        victims.close()


async def reconciled(victims: Victims, client: Client) -> bool:
    """Returns whether Redis lists what each node holds, and nobody reads or writes any more."""
    stub = kvstore_pb2_grpc.KvStoreServiceStub
    try:
        nodes = await client.store.metadata.nodes()
        for node in nodes:
            status = await client.channels.call(node.address, stub, "GetNodeStatus", STATUS, TOLD_S)
            there = (await client.channels.call(node.address, stub, "Exists", EXISTS, TOLD_S)).exists
            listed = await client.store.metadata.listed(node.node_id)
            if status.leases or status.open_puts or listed != {key(each) for each in NUMBERS if there[each]}:
                return False
    except PinyonError:
        return False
    return len(nodes) == NODES


async def test_no_wrong_bytes_and_no_long_calls_whatever_dies(victims: Victims, seed: int) -> None:
    print(f"PINYON_TEST_SEED={seed}")
    async with AsyncExitStack() as stack:
        delays = Delays()
        clients = [
            await stack.enter_async_context(client_of(victims.redis.url, AT_ONCE, TOLD_S)) for _ in range(CLIENTS)
        ]
        loads = [Load(client, seed + number, delays) for number, client in enumerate(clients)]
        tasks = [asyncio.create_task(delays.watch()), *(asyncio.create_task(load.run()) for load in loads)]
        until_s = time.monotonic() + DURATION_S
        async with asyncio.TaskGroup() as group:
            for victim in (victims.redis, *victims.nodes):
                group.create_task(victims.hit(victim, until_s))
        await victims.redis_killed()  # at last, so that no later restart of a node makes good for what it missed
        before = Counter(loads[0].counts)
        await eventually(lambda: loads[0].counts["get hit"] > before["get hit"] + 50, "reads go on")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        counts = sum((load.counts for load in loads), Counter())
        worst = {name: max(load.worst.get(name, 0.0) for load in loads) for name in ("put", "look up", "get")}
        print(dict(sorted(victims.counts.items())), dict(sorted(counts.items())), f"delayed {delays.sum_s:.1f} s")
        print("worst", {name: round(took_s, 2) for name, took_s in worst.items()})
        for task in tasks:
            assert task.cancelled(), task.exception()
        assert counts["put stored"]
        assert max(worst.values()) < CALL_S
        await eventually(lambda: reconciled(victims, clients[0]), "Redis lists what the nodes hold")
        assert sum(client.reader.corrupt for client in clients) == 0
