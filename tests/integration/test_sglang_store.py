"""SGLang's storage backend over a real store node and Redis, with host pools of NumPy arrays."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from launch.process import ServiceProcess
from tests.integration.kvstore_parts import Node
from tests.sglang_double import Pool, config, install, serving
from tests.waiting import eventually

install()

from pinyon.sglang import PinyonHiCache  # noqa: E402 - needs the double

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PATIENT = {"look_s": 10, "load_s": 60, "store_s": 60}
Start = Callable[..., Any]


def hashes(*pages: int) -> list[str]:
    """Returns names of pages, as SGLang makes them."""
    return [hashlib.sha256(str(page).encode()).hexdigest() for page in pages]


@pytest.fixture
async def start(redis_url: str) -> AsyncIterator[Start]:
    """A function that starts a backend over a pool."""
    backends: list[PinyonHiCache] = []

    async def begin(pool: Pool, settings: dict[str, Any] = PATIENT, **changed: Any) -> PinyonHiCache:
        backend = PinyonHiCache(config({"redis_url": redis_url, **settings}, **changed), {})
        backends.append(backend)
        await asyncio.to_thread(backend.register_mem_pool_host, pool)
        return backend

    yield begin
    for backend in backends:
        await asyncio.to_thread(backend.close)


def filled(pool: Pool) -> Pool:
    """Returns the pool, with noise in it."""
    view = pool.kv_buffer.view(np.uint8)
    view[...] = np.random.default_rng(7).integers(0, 256, view.shape, np.uint8)
    return pool


async def put(backend: PinyonHiCache, pool: Pool, *pages: int) -> list[bool]:
    """Stores the pages, and waits until all that the store took can be found."""
    taken = await asyncio.to_thread(backend.batch_set_v1, hashes(*pages), pool.slots(*pages))
    for page, is_taken in zip(pages, taken, strict=True):
        if is_taken:
            await eventually(partial(exists, backend, page), f"page {page} is found")
    return taken


async def exists(backend: PinyonHiCache, *pages: int) -> int:
    found: int = await asyncio.to_thread(backend.batch_exists, hashes(*pages))
    return found


async def get(backend: PinyonHiCache, pool: Pool, pages: dict[int, int]) -> list[bool]:
    """Loads pages to other places."""
    got: list[bool] = await asyncio.to_thread(backend.batch_get_v1, hashes(*pages), pool.slots(*pages.values()))
    return got


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_what_was_set_is_read_back(layout: str, node: Node, start: Start) -> None:
    mine, other = filled(Pool(layout)), Pool(layout, pages=9)
    here, there = await start(mine), await start(other)
    assert await put(here, mine, 1, 5, 7) == [True] * 3
    assert await exists(there, 1, 5, 7) == 3
    assert await get(there, other, {1: 8, 5: 0, 7: 3}) == [True] * 3
    assert [other.page(page) for page in (8, 0, 3)] == [mine.page(page) for page in (1, 5, 7)]
    assert not any(map(any, (other.page(page) for page in (1, 2, 4, 5, 6, 7)))), "nothing else was written"


async def test_leading_pages_only_are_counted_and_read(node: Node, start: Start) -> None:
    pool = filled(Pool())
    backend = await start(pool)
    await put(backend, pool, 0, 1, 3)
    assert await exists(backend, 0, 1, 2, 3) == 2
    assert await exists(backend, 2, 3) == 0
    assert await asyncio.to_thread(backend.exists, hashes(3)[0])
    assert await get(backend, pool, {0: 4, 1: 5, 2: 6, 3: 7}) == [True, True, False, False]
    assert (backend.counts["loaded"], backend.counts["missed"]) == (2, 2)


async def test_a_page_that_is_set_twice_is_copied_once(node: Node, start: Start) -> None:
    pool = filled(Pool())
    first, second = await start(pool), await start(pool)
    assert await put(first, pool, 0, 1) == [True] * 2
    assert await put(second, pool, 0, 1, 2) == await put(first, pool, 0, 1, 2) == [True] * 3
    assert (first.counts["stored"], second.counts["stored"], first.counts["refused"]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("pool", "changed"),
    [
        (Pool(dtype="i2"), {}),
        (Pool("page_first_direct"), {}),
        (Pool(page_size=2, layers=6), {}),
        (Pool(layers=4), {}),
        (Pool(), {"tp_rank": 1, "tp_size": 2}),
        (Pool(), {"tp_size": 2}),
        (Pool(), {"pp_rank": 1, "pp_size": 2}),
        (Pool(), {"attn_cp_rank": 1, "attn_cp_size": 2}),
        (Pool(), {"is_mla_model": True}),
    ],
    ids=["dtype", "layout", "page size", "layers", "rank", "ranks", "stage", "context", "kind"],
)
async def test_unlike_pages_never_hit(pool: Pool, changed: dict[str, Any], node: Node, start: Start) -> None:
    mine = filled(Pool())
    await put(await start(mine), mine, 0, 1)
    other = await start(pool, **changed)
    assert await exists(other, 0, 1) == 0
    assert await get(other, pool, {0: 0}) == [False]


@pytest.mark.parametrize(
    "changed", [{"model_path": "another"}, {"revision": "v2"}, {"kv_cache_dtype": "fp8_e5m2"}, {"load_format": "dummy"}]
)
async def test_other_weights_and_options_never_hit(changed: dict[str, Any], node: Node, start: Start) -> None:
    pool = filled(Pool())
    await put(await start(pool), pool, 0)
    with serving(**changed):
        other, named = await start(pool), await start(pool, {**PATIENT, "fingerprint": "v7"})
    assert await exists(other, 0) == await exists(named, 0) == 0
    again = await start(pool)
    assert await exists(again, 0) == 1


async def test_a_secret_gives_keys_of_its_own(node: Node, start: Start, tmp_path: Any) -> None:
    pool, secret = filled(Pool()), tmp_path / "secret"
    secret.write_text("a cluster's")
    await put(await start(pool), pool, 0)
    other = await start(pool, {**PATIENT, "cluster_secret_file": str(secret)})
    assert await exists(other, 0) == 0


async def test_all_ranks_of_an_mla_model_share_a_copy(node: Node, start: Start) -> None:
    pool = filled(Pool())
    await put(await start(pool, is_mla_model=True, tp_size=2), pool, 0)
    other = await start(pool, is_mla_model=True, tp_rank=1, tp_size=2)
    assert await exists(other, 0) == 1


async def test_after_clear_nothing_is_there(node: Node, start: Start) -> None:
    pool = filled(Pool())
    backend = await start(pool)
    await put(backend, pool, 0)
    backend.clear()
    assert await exists(backend, 0) == 0
    assert await put(backend, pool, 0) == [True]
    assert await exists(backend, 0) == 1


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
async def test_a_dead_store_is_a_miss_in_time(
    fault: signal.Signals, start: Start, start_node: Callable[..., ServiceProcess]
) -> None:
    node, pool = await asyncio.to_thread(start_node), filled(Pool())
    backend = await start(pool, {"look_s": 10, "load_s": 1, "store_s": 1})
    assert await put(backend, pool, 0) == [True]
    node.signal(fault)
    began_s = time.monotonic()
    try:
        assert await get(backend, pool, {0: 1}) == [False]
        assert await put(backend, pool, 2) == [False]
    finally:
        node.signal(signal.SIGCONT)
    assert time.monotonic() - began_s < 30
    assert (backend.counts["missed"], backend.counts["refused"], backend.counts["failed"]) == (1, 1, 0)


async def test_a_redis_that_is_not_there_is_a_miss(start: Start) -> None:
    pool = filled(Pool())
    backend = await start(pool, {"redis_url": "redis://127.0.0.1:1", "look_s": 1, "load_s": 1, "store_s": 1})
    began_s = time.monotonic()
    assert await exists(backend, 0) == 0
    assert await put(backend, pool, 0, 1) == [False] * 2
    assert await get(backend, pool, {0: 0}) == [False]
    assert time.monotonic() - began_s < 30
    assert (backend.counts["refused"], backend.counts["missed"], backend.counts["failed"]) == (2, 1, 0)


async def test_bad_calls_are_misses_and_never_raise(node: Node, start: Start) -> None:
    pool = filled(Pool())
    backend = await start(pool)
    calls: list[Callable[[], list[bool]]] = [
        partial(backend.batch_set_v1, hashes(0), pool.slots(0, 1)),
        partial(backend.batch_set_v1, hashes(0), pool.slots(0) + 1),
        partial(backend.batch_get_v1, hashes(0), None),
        partial(backend.batch_set_v1, hashes(0), pool.slots(999)),
    ]
    for call in calls:
        assert await asyncio.to_thread(call) == [False]
    assert backend.counts["failed"] == 3
    assert await exists(backend, 0) == 0


async def test_a_closed_backend_answers_with_misses(node: Node, start: Start) -> None:
    pool = filled(Pool())
    backend = await start(pool)
    await put(backend, pool, 0)
    await asyncio.to_thread(backend.close)
    assert await get(backend, pool, {0: 0}) == [False]
    assert await put(backend, pool, 1) == [False]
