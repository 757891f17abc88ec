"""Requests of conversations that grow, and clients of the KV store that read their prompts and put what it lacks."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pinyon.core.errors import PinyonError
from pinyon.store.client import StoreClient
from pinyon.store.writer import PutOutcome

OBJECT = 64 << 10
LENGTH = 24
"""The blocks with which a conversation ends; another one then takes its place."""
CONVERSATIONS = 64
GROWTH = 3
"""The largest number of blocks by which a prompt is longer than the one before it."""
SKEW = 0.8
TOLD_S = 2.0
"""The time that each call is given."""
STRIDE = 64
FAILED = {PutOutcome.FAILED, PutOutcome.NO_SPACE}


def block_key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest()


def block_content(number: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(8, "big")).digest(64) * (OBJECT // 64)


def prompts(seed: int) -> Iterator[list[int]]:
    """Yields prompts as the numbers of their blocks, without an end. Which conversation goes on is Zipf-distributed."""
    rng = random.Random(seed)
    weights = [1 / (place + 1) ** SKEW for place in range(CONVERSATIONS)]
    open_ones, begun = [(number, 0) for number in range(CONVERSATIONS)], CONVERSATIONS
    while True:
        (place,) = rng.choices(range(CONVERSATIONS), weights)
        number, length = open_ones[place]
        length += rng.randint(1, GROWTH)
        yield [number * STRIDE + block for block in range(length)]
        open_ones[place] = (number, length)
        if length >= LENGTH:
            open_ones[place], begun = (begun, 0), begun + 1


@dataclass
class Answered:
    """One request: when it began and ended, by the monotonic clock, and how many of its blocks were read."""

    began_s: float
    ended_s: float
    asked: int
    read: int


class PromptLoad:
    """Clients that take prompts in turn, one at a time each. What arrives is compared with what was put."""

    def __init__(self, store: StoreClient, clients: int, seed: int) -> None:
        self._store = store
        self._prompts = prompts(seed)
        self._buffers = [bytearray((LENGTH + GROWTH) * OBJECT) for _ in range(clients)]
        self._memories = [store.register(buffer, OBJECT) for buffer in self._buffers]
        self.pause_s = 0.0
        """The time between the beginnings of a client's requests."""
        self.answered: list[Answered] = []
        self.failed: list[str] = []
        """The errors of calls."""
        self.wrong = 0
        """The number of blocks that arrived with other bytes."""
        self.used_s: dict[int, float] = {}
        """The time at which each block was last read or stored."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for client in range(len(self._buffers)):
                group.create_task(self._client(client))

    async def _client(self, client: int) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self._request(client, next(self._prompts))
            except PinyonError as error:
                self.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(max(0.0, began_s + self.pause_s - time.monotonic()))

    async def _request(self, client: int, numbers: list[int]) -> None:
        began_s = time.monotonic()
        buffer, pieces = memoryview(self._buffers[client]), self._memories[client].pieces
        objects = [(block_key(number), pieces(slot)) for slot, number in enumerate(numbers)]
        arrived = await self._store.get(objects, OBJECT, TOLD_S, leading=True)
        read = (*arrived, False).index(False)
        for slot, number in enumerate(numbers):
            place, content = buffer[slot * OBJECT : (slot + 1) * OBJECT], block_content(number)
            if slot < read:
                self.wrong += place != content
            place[:] = content
        outcomes = await self._store.put(objects[read:], OBJECT, TOLD_S)
        self.failed += [f"put {each.value}" for each in outcomes if each in FAILED]
        ended_s = time.monotonic()
        stored = [number for number, each in zip(numbers[read:], outcomes, strict=True) if each is PutOutcome.STORED]
        self.used_s |= dict.fromkeys([*numbers[:read], *stored], ended_s)
        self.answered.append(Answered(began_s, ended_s, len(numbers), read))

    def ratio(self, from_s: float, until_s: float) -> float | None:
        """Returns the share of the blocks that were read, of the requests that began in this time."""
        those = [each for each in self.answered if from_s <= each.began_s < until_s]
        asked = sum(each.asked for each in those)
        return sum(each.read for each in those) / asked if asked else None

    def worst_s(self, from_s: float) -> float:
        """Returns the longest time of a request (a read and a put) that ended after ``from_s``."""
        return max((each.ended_s - each.began_s for each in self.answered if each.ended_s >= from_s), default=0.0)
