"""The queue for the store, whatever the store does: bounded, never in the way of a request, and emptied at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from pinyon.core.errors import Unavailable
from pinyon.core.layout import KvLayout
from pinyon.core.request import RequestClass
from pinyon.eviction import NO_TRAITS
from pinyon.store.kv_memory import KvMemory
from pinyon.store.writer import PutOutcome
from pinyon.transfer import Access, Region
from services.worker.kv.storage import POOL_SHARE, Storage
from services.worker.orders.limits import WorkerLimits
from tests.unit.worker.caches import Holder, new_cache
from tests.worker_integrity import check_pool

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=4)
REGION = Region(memoryview(bytearray(1)), "", Access.NONE)
POOL = 24
QUEUE_S = 5.0

REQUEST = st.tuples(st.just("request"), st.integers(0, 5), st.integers(1, POOL))
"""The prompt's number, and how many blocks it takes."""
END = st.tuples(st.just("end"), st.integers(0, 9), st.just(0))
"""The end of a running request, which then offers its new blocks."""
ANSWER = st.tuples(st.just("answer"), st.sampled_from([*range(4), -1]), st.just(0))
"""The store's answer: the outcome of each object; -1 is an error."""
TIME = st.tuples(st.just("time"), st.integers(1, 8), st.just(0))
OPERATIONS = st.lists(st.one_of(REQUEST, REQUEST, END, END, ANSWER, TIME), max_size=60)

OUTCOMES = [PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.BEING_PUT, PutOutcome.FAILED]


class Store:
    def __init__(self) -> None:
        self.asked: asyncio.Future[int] | None = None
        self.writing = 0
        self.losses = 0

    async def nodes(self) -> None:
        self.losses += 1

    async def put(self, objects: Sequence[Any], *_: Any, **__: Any) -> tuple[PutOutcome, ...]:
        self.asked = asyncio.get_running_loop().create_future()
        self.writing = len(objects)
        answer = await self.asked
        self.writing = 0
        if answer < 0:
            raise Unavailable("away")
        return (OUTCOMES[answer],) * len(objects)


class Play:
    def __init__(self) -> None:
        self.now = 0.0
        self.cache = new_cache(LAYOUT, POOL, lambda: self.now)
        self.store = Store()
        memory = KvMemory.whole(REGION, LAYOUT.block_bytes)
        self.storage = Storage(self.cache, memory, self.store, WorkerLimits(store_queue_s=QUEUE_S), lambda: self.now)
        self.requests: list[tuple[Holder, list[bytes]]] = []

    def do(self, operation: str, number: int, blocks: int) -> None:
        if operation == "request":
            keys = [bytes([number]) * 15 + bytes([index]) for index in range(blocks)]
            self.requests.append((Holder(self.cache, keys, blocks), keys))
        elif operation == "end" and self.requests:
            self.end(number % len(self.requests))
        elif operation == "answer" and self.store.asked is not None and not self.store.asked.done():
            self.store.asked.set_result(number)
        elif operation == "time":
            self.now += number

    def end(self, index: int) -> None:
        holder, keys = self.requests.pop(index)
        if holder.waits:
            holder.withdraw()
            return
        reservation = holder.reservation
        made = slice(reservation.held, None)
        self.storage.reused(keys[: reservation.held], reservation.table, self.storage.new_runs())
        duplicates = self.cache.publish(reservation.table, keys[made], NO_TRAITS, reservation.held)
        self.cache.release(duplicates)
        # Prompts of several kinds: a put of one kind has few blocks, so the others wait.
        self.storage.offer(keys[made], self.storage.new_runs(), RequestClass(f"kind-{keys[0][0]}", 1))
        holder.end()

    def check(self) -> None:
        check_pool(self.cache.pool)
        assert self.storage.pending <= POOL // POOL_SHARE
        requested = sum(not holder.waits for holder, _ in self.requests)
        if self.cache.admission.waiting and not requested:
            assert self.store.writing, "nobody waits when nothing is being written"
            assert self.cache.pool.used == self.storage.pending == self.store.writing, "nothing else is in the way"

    async def run(self, operations: Sequence[tuple[str, int, int]]) -> None:
        self.storage.start()
        for operation in operations:
            self.do(*operation)
            for _ in range(4):  # runs the writing task
                await asyncio.sleep(0)
            self.check()
        while self.requests:
            self.end(0)
        await self.storage.close()
        assert self.cache.pool.used == self.storage.pending == self.cache.admission.waiting == 0


@given(OPERATIONS)
@example([("request", 0, 2), ("end", 0, 0), ("request", 1, 2), ("end", 0, 0), ("request", 2, 22)])
def test_requests_come_first_and_everything_is_given_back(operations: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        await Play().run(operations)

    asyncio.run(play())
