"""Background puts: bounded, referenced while they wait, given back whatever happens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pinyon.core.errors import Unavailable
from pinyon.core.layout import KvLayout
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.store.client import PutOutcome, PutResult
from services.worker.kv.storage import Storage
from tests.unit.worker.caches import new_cache

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=4)
KEYS = [bytes([number]) * 16 for number in range(8)]


class Store:
    """Keeps what it is given, when it is let."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked = asyncio.Event()
        self.puts: list[tuple[list[bytes], bytes]] = []
        self.classes: list[RequestClass] = []
        self.error: Exception | None = None

    async def put(self, objects, object_bytes, timeout_s, *, affinity=None, request_class=UNKNOWN_CLASS):
        assert all(offset % object_bytes == 0 for _, _, offset in objects)
        self.classes.append(request_class)
        self.puts.append(([key for key, _, _ in objects], affinity))
        self.asked.set()
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return PutResult((PutOutcome.STORED,) * len(objects))


@pytest.fixture
async def parts():
    cache = new_cache(LAYOUT, 8, lambda: 0.0)
    blocks = cache.reserve([], 8).result().table
    cache.publish(blocks, KEYS)
    cache.release(blocks)
    store = Store()
    storage = Storage(cache, None, store, queue_blocks=3, timeout_s=1.0)
    storage.start()
    yield cache, store, storage
    await storage.close()
    assert cache.pool.used == 0
    assert storage.pending == 0
    cache.pool.check_integrity()


async def idle(storage: Storage) -> None:
    async with asyncio.timeout(10):
        while storage.pending:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_put_is_for_one_kind_of_request(parts):
    _, store, storage = parts
    first, later = (RequestClass("chat", 1, "s", user, tenant="t") for user in ("anna", "bert"))
    second_turn = RequestClass("chat", 2)
    storage.offer(KEYS[:1], KEYS[0], first)
    storage.offer(KEYS[1:2], KEYS[0], second_turn)
    storage.offer(KEYS[2:3], KEYS[0], later)
    store.open.set()
    await idle(storage)
    assert store.puts == [([KEYS[0], KEYS[2]], KEYS[0]), ([KEYS[1]], KEYS[0])]
    assert store.classes == [RequestClass("chat", 1, tenant="t"), second_turn]


async def test_blocks_are_held_until_they_are_stored_and_stored_once(parts):
    cache, store, storage = parts
    storage.offer(KEYS[:2], KEYS[0])
    await store.asked.wait()
    assert cache.pool.used == 2
    store.open.set()
    await idle(storage)
    assert cache.pool.used == 0
    storage.offer(KEYS[:3], KEYS[0])
    await idle(storage)
    assert store.puts == [([KEYS[0], KEYS[1]], KEYS[0]), ([KEYS[2]], KEYS[0])]
    assert (storage.stored, storage.dropped) == (3, 0)


async def test_prompts_are_put_one_by_one_so_that_each_stays_together(parts):
    _, store, storage = parts
    storage.offer([KEYS[0]], b"a")
    storage.offer([KEYS[1]], b"b")
    storage.offer([KEYS[2]], b"a")
    store.open.set()
    await idle(storage)
    assert store.puts == [([KEYS[0], KEYS[2]], b"a"), ([KEYS[1]], b"b")]


async def test_too_many_are_dropped_and_counted(parts):
    cache, store, storage = parts
    storage.offer(KEYS, KEYS[0])
    assert storage.dropped == 5
    assert cache.pool.used == 3
    store.open.set()
    await idle(storage)


@pytest.mark.parametrize("error", [Unavailable("down"), RuntimeError("defect")])
async def test_a_store_that_fails_gets_nothing_for_a_while_and_blocks_come_back(parts, error):
    cache, store, storage = parts
    store.error = error
    store.open.set()
    storage.offer(KEYS[:2], KEYS[0])
    await idle(storage)
    assert cache.pool.used == 0
    assert (storage.stored, storage.dropped) == (0, 2)
    storage.offer(KEYS[2:3], KEYS[0])
    await asyncio.sleep(0)
    assert len(store.puts) == 1


async def test_pauses_grow_while_the_store_fails(parts, monkeypatch):
    cache, store, _ = parts
    slept: list[float] = []
    now = [0.0]

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        now[0] += delay_s

    monkeypatch.setattr("services.worker.kv.storage.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    storage = Storage(cache, None, store, 3, 1.0, lambda: now[0])
    storage.start()
    store.open.set()
    for number, error in enumerate([Unavailable("down"), Unavailable("down"), None, Unavailable("down")]):
        store.error = error
        storage.offer(KEYS[number : number + 1], KEYS[0])
        await idle(storage)
    await storage.close()
    assert slept == [1.0, 2.0, 1.0]


async def test_closing_in_the_middle_gives_everything_back(parts):
    _, store, storage = parts
    storage.offer(KEYS[:3], KEYS[0])
    await store.asked.wait()
    await storage.close()


async def test_no_store_takes_nothing():
    cache = new_cache(LAYOUT, 2, lambda: 0.0)
    storage = Storage(cache, None, None, queue_blocks=3, timeout_s=1.0)
    storage.start()
    storage.offer(KEYS[:2], KEYS[0])
    assert storage.pending == 0
    await storage.close()
