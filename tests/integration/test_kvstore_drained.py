"""A store node, a process of its own, that is drained and stopped while clients read and put.

No call fails, no byte is wrong, and what was once read stays readable. Nothing here depends on how long things take."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from launch.process import ServiceProcess
from pinyon.cli import main
from pinyon.store.writer import PutOutcome
from tests.integration.kvstore_parts import OBJECT, Client, client_of, content, key
from tests.waiting import WAIT_S, eventually

CONVERSATIONS, ONCE, BLOCKS = 24, 100, 8
"""The conversations with many requests, and those with one. All blocks fit into one node, which has 64 MiB."""
ENOUGH = 30
"""The requests of each client before and after."""
CLIENTS = 3


class Reader:
    """A client that asks for a part of a conversation, and puts what the store lacks, as a worker does."""

    def __init__(self, client: Client, seed: int, fresh: Iterator[int], seen: set[int], stored: set[int]) -> None:
        """Takes the conversations to come, and the objects that were read and that were stored, by any client."""
        self.client, self.rng = client, random.Random(seed)
        self.fresh, self.seen, self.stored = fresh, seen, stored
        self.counts: Counter[str] = Counter()

    async def get(self, numbers: list[int]) -> int:
        """Returns how many of the leading objects arrived, after checking them."""
        self.client.memory[:] = bytes(len(self.client.memory))
        objects = [(key(number), self.client.kv.pieces(slot)) for slot, number in enumerate(numbers)]
        arrived = (*await self.client.store.get(objects, OBJECT, WAIT_S, leading=True), False).index(False)
        for slot, number in enumerate(numbers[:arrived]):
            assert self.client.slot(slot) == content(number), f"object {number} holds something else"
        return arrived

    async def ask(self) -> None:
        number = min(int(self.rng.paretovariate(0.5)) - 1, CONVERSATIONS - 1)
        if self.rng.random() < 0.25:  # puts go on all the time
            number = next(self.fresh, number)
        numbers = list(range(BLOCKS * number, BLOCKS * number + self.rng.randint(1, BLOCKS)))
        known = self.seen.copy()
        arrived = await self.get(numbers)
        if arrived < len(numbers) and numbers[arrived] in known:  # its node was stopped after the look-up
            self.counts["again"] += 1
            arrived = await self.get(numbers)
        assert arrived == len(numbers) or numbers[arrived] not in known, f"object {numbers[arrived]} is lost"
        self.seen.update(numbers[:arrived])
        outcomes = await self.client.put(numbers[arrived:])
        done = zip(numbers[arrived:], outcomes, strict=True)
        self.stored.update(number for number, outcome in done if outcome is PutOutcome.STORED)
        assert not {PutOutcome.FAILED, PutOutcome.NO_SPACE} & set(outcomes)
        self.counts["asked"] += 1

    async def run(self) -> None:
        while True:
            await self.ask()


async def test_a_drain_under_load_loses_nothing_and_fails_nobody(
    redis_url: str, start_node: Callable[..., ServiceProcess]
) -> None:
    leaving, _ = (start_node(node_id=node_id) for node_id in ("kv-0", "kv-1"))
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(redis_url, BLOCKS)) for _ in range(CLIENTS)]
        fresh, seen, stored = iter(range(CONVERSATIONS, CONVERSATIONS + ONCE)), set[int](), set[int]()
        readers = [Reader(client, seed, fresh, seen, stored) for seed, client in enumerate(clients)]

        async def more() -> None:
            goals = [reader.counts["asked"] + ENOUGH for reader in readers]

            def asked() -> bool:
                for load in loads:
                    if load.done():
                        load.result()
                return all(reader.counts["asked"] >= goal for reader, goal in zip(readers, goals, strict=True))

            await eventually(asked, "requests go on")

        loads = [asyncio.create_task(reader.run()) for reader in readers]
        try:
            await more()
            words = ["kv", "drain", "--node", "kv-0", "--redis-url", redis_url]
            assert await asyncio.to_thread(main, words) == 0
            leaving.signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaving.wait, WAIT_S), "it does not end"
            assert leaving.process is not None
            assert leaving.process.returncode == 0
            await more()
        finally:
            for load in loads:
                load.cancel()
            await asyncio.wait(loads)
        assert [node.node_id for node in await clients[0].store.metadata.nodes()] == ["kv-1"]
        await clients[0].until_listed(sorted(stored | seen))
        for number in stored | seen:
            assert await readers[0].get([number]) == 1, f"object {number} is lost"
        assert not sum(client.reader.corrupt for client in clients)
