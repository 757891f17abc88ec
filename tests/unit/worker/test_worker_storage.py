"""Background puts: bounded, referenced while they wait, and given back to whoever wants the room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest

from pinyon.core.errors import Unavailable
from pinyon.core.layout import KvLayout
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.store.kv_memory import KvMemory, Pieces
from pinyon.store.runs import RUN_TOKENS, Run
from pinyon.store.writer import PutOutcome
from pinyon.transfer import Access, Region
from services.worker.kv.cache import KvCache
from services.worker.kv.storage import LOOK_S, POOL_SHARE, Drop, Storage
from services.worker.orders.limits import WorkerLimits
from tests.unit.worker.caches import Holder, new_cache
from tests.worker_integrity import check_pool

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=4)
REGION = Region(memoryview(bytearray(1)), "", Access.NONE)
KEYS = [bytes([number]) * 16 for number in range(8)]
POOL = 16
QUEUE_S = 5.0


class Store:
    """A store that keeps what it is given, when the test lets it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked = asyncio.Event()
        self.puts: list[list[bytes]] = []
        self.runs: list[Sequence[Run]] = []
        self.classes: list[RequestClass] = []
        self.places: list[list[int]] = []
        self.held: set[bytes] = set()
        self.new = PutOutcome.STORED
        """The outcome of a put of an object that the store lacks."""
        self.error: Exception | None = None
        self.losses = 0
        self.lost = 0
        """The number of node losses that the next look finds."""

    async def nodes(self) -> None:
        self.losses = self.lost

    async def put(
        self,
        objects: Sequence[tuple[bytes, Pieces]],
        object_bytes: int,
        timeout_s: float,
        *,
        runs: Sequence[Run] | None = None,
        request_class: RequestClass = UNKNOWN_CLASS,
        places: Sequence[int] | None = None,
    ) -> tuple[PutOutcome, ...]:
        assert all(offset % object_bytes == 0 for _, ((_, offset, _),) in objects)
        assert runs is not None
        keys = [key for key, _ in objects]
        self.classes.append(request_class)
        self.places.append(list(places or ()))
        self.puts.append(keys)
        self.runs.append(runs)
        self.asked.set()
        await self.open.wait()
        if self.error is not None:
            raise self.error
        result = tuple(PutOutcome.EXISTS if key in self.held else self.new for key in keys)
        if self.new is PutOutcome.STORED:
            self.held.update(keys)
        return result


class Parts:
    def __init__(self) -> None:
        self.now = 0.0
        self.cache: KvCache = new_cache(LAYOUT, POOL, lambda: self.now)
        first = Holder(self.cache, [], len(KEYS))
        self.cache.publish(first.table, KEYS)
        first.end()
        self.store = Store()
        self.storage = self.new_storage(3)

    def new_storage(self, queue_blocks: int) -> Storage:
        memory = KvMemory.whole(REGION, LAYOUT.block_bytes)
        limits = WorkerLimits(store_queue_blocks=queue_blocks, store_queue_s=QUEUE_S)
        return Storage(self.cache, memory, self.store, limits, lambda: self.now)

    def offer(self, keys: Sequence[bytes], request_class: RequestClass = UNKNOWN_CLASS, first: int = 0) -> None:
        """Offers the keys as the first blocks of a prompt."""
        self.storage.offer(keys, self.storage.new_runs(), request_class, first)

    def reuse(self, keys: Sequence[bytes]) -> None:
        """Reuses the keys as the first blocks of a prompt."""
        table = [block for _, block in self.cache.hold(keys)]
        self.storage.reused(keys, table, self.storage.new_runs())
        self.cache.release(table)

    async def writing(self, keys: Sequence[bytes]) -> None:
        """Begins a put of these keys, which lasts until the store is opened."""
        self.offer(keys)
        await self.store.asked.wait()

    async def offered(self, keys: Sequence[bytes]) -> None:
        self.offer(keys)
        await self.idle()

    async def reused(self, keys: Sequence[bytes]) -> None:
        self.reuse(keys)
        await self.idle()

    async def let_go(self) -> None:
        """Opens the store, and waits for the puts."""
        self.store.open.set()
        await self.idle()

    async def idle(self) -> None:
        async with asyncio.timeout(60):
            while self.storage.pending:  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    parts = Parts()
    parts.storage.start()
    yield parts
    await parts.storage.close()
    assert parts.cache.pool.used == 0
    assert parts.storage.pending == 0
    check_pool(parts.cache.pool)


async def test_a_put_is_for_one_kind_of_request(parts: Parts) -> None:
    first, later = (RequestClass("chat", 1, "s", user, tenant="t") for user in ("anna", "bert"))
    second_turn, other_tenant = RequestClass("chat", 2, tenant="t"), RequestClass("chat", 1, tenant="u")
    parts.storage = storage = parts.new_storage(4)
    storage.start()
    for place, (key, request_class) in enumerate(zip(KEYS, (first, second_turn, later, other_tenant), strict=False)):
        parts.offer([key], request_class, 10 + place)
    await parts.let_go()
    assert parts.store.puts == [[KEYS[0], KEYS[2]], [KEYS[1]], [KEYS[3]]]
    assert parts.store.classes == [RequestClass("chat", 1, tenant="t"), second_turn, other_tenant]
    assert parts.store.places == [[10, 12], [11], [13]]


async def test_blocks_are_held_until_they_are_stored_and_stored_once(parts: Parts) -> None:
    await parts.writing(KEYS[:2])
    assert parts.cache.pool.used == 2
    parts.offer(KEYS[:2])  # being written: not offered again
    await parts.let_go()
    assert parts.cache.pool.used == 0
    await parts.offered(KEYS[:3])
    assert (parts.storage.stored, parts.storage.drops.total()) == (3, 0)


async def test_what_the_store_has_lost_is_offered_again(parts: Parts) -> None:
    parts.store.open.set()
    await parts.offered(KEYS[:2])
    parts.store.held.clear()  # evicted at the node, or the node was restarted
    await parts.offered(KEYS[:2])
    assert parts.store.puts == [KEYS[:2], KEYS[:2]]
    assert parts.storage.stored == 4


async def test_reused_blocks_are_offered_again_once_per_lost_node(parts: Parts) -> None:
    parts.store.open.set()
    await parts.offered(KEYS[:2])
    parts.reuse(KEYS[:3])  # the third block came from elsewhere, so its put is unknown here
    await parts.idle()
    assert parts.store.puts == [KEYS[:2], [KEYS[2]]]
    for lost in (1, 2):
        parts.store.held.clear()
        parts.store.lost = lost
        parts.now += LOOK_S
        async with asyncio.timeout(60):
            while parts.store.losses < lost:
                parts.reuse(KEYS[:3])
                await asyncio.sleep(0)
        await parts.reused(KEYS[:3])
        for _ in range(3):
            await parts.reused(KEYS[:3])
        assert parts.store.puts[1 + lost :] == [KEYS[:3]]
    assert (parts.storage.stored, parts.storage.drops.total()) == (9, 0)


async def test_what_was_dropped_is_offered_again_when_it_is_reused(parts: Parts) -> None:
    await parts.writing(KEYS[:2])
    parts.offer(KEYS[2:5])  # room for one
    parts.store.new = PutOutcome.FAILED
    await parts.let_go()
    parts.now += 100.0
    parts.store.new = PutOutcome.STORED
    await parts.reused(KEYS[:5])
    await parts.reused(KEYS[:5])
    await parts.reused(KEYS[:5])
    assert parts.store.held == set(KEYS[:5])
    assert parts.storage.stored == 5


async def test_new_content_counts_as_never_offered_in_a_reused_block(parts: Parts) -> None:
    parts.store.open.set()
    for _ in range(3):  # room for three at a time
        await parts.reused(KEYS)
    assert parts.store.held == set(KEYS)
    newer = [bytes([number]) * 16 for number in range(100, 100 + POOL)]
    one = Holder(parts.cache, [], POOL)
    parts.cache.publish(one.table, newer)
    one.end()
    parts.offer(newer)
    assert parts.storage.drops.total() == POOL - 3
    for _ in range(POOL):
        await parts.idle()
        await parts.reused(newer)
    assert parts.store.held == {*KEYS, *newer}


async def test_a_look_that_fails_does_not_end_it(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        parts.store.asked.set()
        raise RuntimeError("a defect")

    monkeypatch.setattr(parts.store, "nodes", broken)
    parts.store.open.set()
    await parts.offered(KEYS[:1])
    parts.store.asked.clear()
    parts.now += LOOK_S
    parts.reuse(KEYS[:1])
    await parts.store.asked.wait()
    await parts.offered(KEYS[1:2])
    assert parts.storage.stored == 2


async def test_what_somebody_else_is_putting_does_not_count_as_stored(parts: Parts) -> None:
    parts.store.new = PutOutcome.BEING_PUT
    parts.store.open.set()
    await parts.offered(KEYS[:2])
    assert (parts.storage.stored, parts.storage.drops.total()) == (0, 0)
    parts.store.new = PutOutcome.STORED  # the other put failed
    await parts.offered(KEYS[:2])
    assert parts.store.puts == [KEYS[:2], KEYS[:2]], "a store that is busy with a block is not left alone"
    assert parts.storage.stored == 2


async def test_blocks_of_several_prompts_travel_together_in_their_runs(parts: Parts) -> None:
    one, other = parts.storage.new_runs(), parts.storage.new_runs()
    parts.storage.offer([KEYS[0]], one)
    parts.storage.offer([KEYS[1]], other)
    parts.storage.offer([KEYS[2]], one)
    await parts.let_go()
    assert parts.store.puts == [KEYS[:3]]
    (runs,) = parts.store.runs
    assert runs[0] is runs[2] is not runs[1]


async def test_a_long_prompt_is_several_runs(parts: Parts) -> None:
    runs = parts.storage.new_runs()
    length = RUN_TOKENS // LAYOUT.block_tokens
    parts.storage.offer([KEYS[0]], runs)
    skipped = [runs.next() for _ in range(length - 1)]
    parts.storage.offer([KEYS[1]], runs)
    await parts.let_go()
    ((first, second),) = parts.store.runs
    assert {first} == set(skipped)
    assert second is not first


async def test_too_many_are_dropped_and_counted(parts: Parts) -> None:
    parts.offer(KEYS)
    assert parts.storage.drops == Counter({Drop.QUEUE: 5})
    assert parts.cache.pool.used == 3
    await parts.let_go()


async def test_only_a_share_of_the_pool_waits_for_a_store_that_hangs(parts: Parts) -> None:
    storage = parts.new_storage(512)
    storage.start()
    storage.offer(KEYS[:2], storage.new_runs())
    await parts.store.asked.wait()
    storage.offer(KEYS[2:], storage.new_runs())
    assert parts.cache.pool.used == storage.pending == POOL // POOL_SHARE
    await storage.close()


@pytest.mark.parametrize("error", [Unavailable("down"), RuntimeError("defect")])
async def test_a_failing_store_is_paused_and_holds_no_block(parts: Parts, error: Exception) -> None:
    parts.store.error = error
    await parts.writing(KEYS[:1])
    parts.offer(KEYS[1:3])
    assert parts.cache.pool.used == 3
    await parts.let_go()
    assert parts.cache.pool.used == 0, "what waited behind the put that failed"
    parts.offer(KEYS[3:5])
    assert parts.cache.pool.used == 0, "what came within the pause"
    assert (parts.storage.stored, parts.storage.drops) == (0, Counter({Drop.STORE: 5}))
    await asyncio.sleep(0)
    assert len(parts.store.puts) == 1


async def test_pauses_grow_while_the_store_fails_and_end_afterwards(parts: Parts) -> None:
    parts.store.open.set()
    asked_s = []
    for step in range(100):  # one offer every tenth of a second
        parts.now = step / 10
        parts.store.error = None if 3.0 <= parts.now < 4.0 else Unavailable("down")
        before = len(parts.store.puts)
        await parts.offered(KEYS[:1])
        if len(parts.store.puts) > before:
            asked_s.append(parts.now)
    working_s = [3.0 + tenth / 10 for tenth in range(10)]
    assert asked_s == pytest.approx([0.0, 1.0, *working_s, 4.0, 5.0, 7.0])


async def test_a_store_without_room_is_left_alone_for_a_while(parts: Parts) -> None:
    parts.store.open.set()
    parts.store.new = PutOutcome.NO_SPACE
    await parts.offered(KEYS[:2])
    parts.offer(KEYS[2:3])
    assert parts.storage.drops == Counter({Drop.SPACE: 2, Drop.STORE: 1})


async def test_a_block_waits_only_so_long(parts: Parts) -> None:
    await parts.writing(KEYS[:1])
    parts.offer(KEYS[1:2])
    parts.now = QUEUE_S / 2
    parts.offer(KEYS[2:3])
    parts.now = QUEUE_S
    parts.offer(KEYS[3:4])
    assert parts.storage.drops == Counter({Drop.LATE: 1})
    assert parts.storage.pending == 3
    parts.now = 2 * QUEUE_S
    parts.store.open.set()  # the next put begins too late for all of them
    await parts.idle()
    assert parts.store.puts == [KEYS[:1]]
    assert parts.storage.drops == Counter({Drop.LATE: 3})


async def test_requests_take_needed_room_from_the_longest_waiting(parts: Parts) -> None:
    await parts.writing(KEYS[:1])
    parts.offer(KEYS[1:3])
    reserved = Holder(parts.cache, [], POOL - 2)
    assert not reserved.waits, "one block of those that waited was enough"
    assert parts.storage.drops == Counter({Drop.ROOM: 1})
    more = Holder(parts.cache, [], 1)
    assert not more.waits
    last = Holder(parts.cache, [], 1)
    assert last.waits, "what is being written stays until it is"
    await parts.let_go()
    assert not last.waits
    for each in (reserved, more, last):
        each.end()
    assert parts.store.puts == [KEYS[:1]]
    assert parts.storage.drops == Counter({Drop.ROOM: 2})


async def test_a_block_used_elsewhere_is_not_dropped_for_its_room(parts: Parts) -> None:
    await parts.writing(KEYS[:1])
    using = Holder(parts.cache, KEYS[:2], 2)
    parts.offer(KEYS[1:3])
    wanted = Holder(parts.cache, [], POOL - 1)
    assert parts.storage.drops == Counter({Drop.ROOM: 1}), "only the one whose room would be free"
    assert wanted.waits
    using.end()
    assert parts.storage.drops == Counter({Drop.ROOM: 2})
    await parts.let_go()
    wanted.end()


async def test_closing_in_the_middle_gives_everything_back(parts: Parts) -> None:
    await parts.writing(KEYS[:3])
    await parts.storage.close()


async def test_no_store_takes_nothing() -> None:
    cache = new_cache(LAYOUT, 8, lambda: 0.0)
    memory = KvMemory.whole(REGION, LAYOUT.block_bytes)
    storage = Storage(cache, memory, None, WorkerLimits(store_queue_blocks=3), lambda: 0.0)
    storage.start()
    storage.offer(KEYS[:2], storage.new_runs())
    assert storage.pending == 0
    await storage.close()
