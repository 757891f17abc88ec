"""The examples of docs/use/store-client.md, and what it says of misses and errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from launch.process import ROOT
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.store.client import StoreClient
from pinyon.store.connect import open_store, open_sync_store
from pinyon.store.reader import PartRange
from pinyon.store.records import NodeRecord, entry_of
from pinyon.store.writer import PutOutcome
from tests.integration.kvstore_parts import OBJECT, Client, Node, content, key, running_node
from tests.ports import kept_port
from tests.waiting import WAIT_S, eventually

EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/use/store-client.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("example", EXAMPLES, ids=["async", "sync"])
async def test_the_examples_of_the_page_run(redis_url: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_node(redis_url, pool_mib=8):
        code = example.replace("redis://127.0.0.1:6379/0", redis_url)
        assert code != example
        await asyncio.to_thread(exec, compile(code, "example", "exec"), {"__name__": "example"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] in ("stored", str(["stored"] * 8))
    assert lines[-1] in ("1 copy removed", "8 copies removed")


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[StoreClient]:
    async with open_store(redis_url, redis_timeout_s=WAIT_S) as store:
        yield store


async def put(store: StoreClient, *numbers: int, parts: int = 1) -> None:
    memory = store.register(bytearray(b"".join(map(content, numbers))), OBJECT)
    objects = [(key(number), memory.pieces(slot)) for slot, number in enumerate(numbers)]
    outcomes = await store.put(objects, OBJECT, WAIT_S, parts=parts)
    assert set(outcomes) == {PutOutcome.STORED}

    async def listed() -> bool:
        return all(await store.exists([key(number) for number in numbers], OBJECT, WAIT_S))

    await eventually(listed, "objects in Redis")


async def get(store: StoreClient, *numbers: int, leading: bool = False) -> list[bool]:
    """Gets objects and checks those that arrive."""
    buffer = bytearray(len(numbers) * OBJECT)
    memory = store.register(buffer, OBJECT)
    objects = [(key(number), memory.pieces(slot)) for slot, number in enumerate(numbers)]
    arrived = await store.get(objects, OBJECT, WAIT_S, leading=leading)
    for slot, number in enumerate(numbers):
        assert not arrived[slot] or buffer[slot * OBJECT : (slot + 1) * OBJECT] == content(number)
    return arrived


async def test_get_reads_around_what_a_node_has_lost(node: Node, store: StoreClient) -> None:
    await put(store, *range(6))
    node.node.table.remove([key(0), key(3)])  # Redis is not told
    assert await get(store, *range(7)) == [False, True, True, False, True, True, False]
    assert await get(store, 1, 9, 2) == [True, False, True]
    assert await get(store, 1, 9, 2, leading=True) == [True, False, False]
    await eventually(node.nothing_is_left, "no lease")


async def test_get_reads_the_other_copy_of_what_one_node_lost(
    redis_url: str, store: StoreClient, client: Client
) -> None:
    async with running_node(redis_url, "kv-0") as first, running_node(redis_url, "kv-1") as second:
        number = 0
        while key(number) not in second.node.table:
            number += 1
            await put(store, number)
        # kv-0, which is asked first as it is read less, lists the object and does not have it.
        store._channels.reads[second.address] += 1
        asked_first = next(each for each in await store.nodes() if each.node_id == "kv-0")
        await client.store.metadata.restart(asked_first.life)
        await client.store.metadata.change(asked_first.life, [], [(key(number), entry_of(OBJECT))])
        assert len((await store.locate([key(number)], WAIT_S))[0]) == 2
        assert await get(store, number) == [True]
        assert first.node.table.counters.misses == 1


async def test_a_range_of_parts_is_read_alone(node: Node, store: StoreClient) -> None:
    await put(store, 1, 2, parts=16)
    part = OBJECT // 16
    buffer = bytearray(2 * 3 * part)
    memory = store.register(buffer, 3 * part)
    objects = [(key(number), memory.pieces(slot)) for slot, number in enumerate((1, 2))]
    assert await store.get(objects, OBJECT, WAIT_S, parts=PartRange(5, 3, 16)) == [True, True]
    assert buffer == b"".join(content(number)[5 * part : 8 * part] for number in (1, 2))
    for wrong in (PartRange(14, 3, 16), PartRange(0, 1, 3), PartRange(0, 0, 16), PartRange(-1, 2, 16)):
        with pytest.raises(InvalidArgument, match=f"no {wrong.number} of {wrong.of} parts"):
            await store.get(objects, OBJECT, WAIT_S, parts=wrong)


async def test_remove_takes_every_copy_and_says_how_many(redis_url: str, store: StoreClient) -> None:
    async with running_node(redis_url, "kv-0"), running_node(redis_url, "kv-1"):
        await put(store, 1, 2, 3)
        assert await store.remove([key(number) for number in range(5)], WAIT_S) == 3
        assert await get(store, 1, 2, 3) == [False] * 3


async def test_without_redis_there_are_clear_errors_in_time() -> None:
    with kept_port() as port:
        url = f"redis://127.0.0.1:{port}/0"
        async with open_store(url) as store:
            with pytest.raises(Unavailable, match="Redis"):
                await store.exists([key(1)], OBJECT, 1.0)

        def threads() -> None:
            with open_sync_store(url) as store:
                memory = store.register(bytearray(OBJECT), OBJECT)
                put = store.put([(key(1), memory.pieces(0))], OBJECT, 1.0)
                assert put.result(WAIT_S) == (PutOutcome.FAILED,)
                with pytest.raises(Unavailable, match="Redis"):
                    store.get([(key(1), memory.pieces(0))], OBJECT, 1.0).result(WAIT_S)

        await asyncio.to_thread(threads)


async def test_a_setting_that_is_wrong_is_named() -> None:
    for settings in ({"transfer_listen": "nowhere"}, {"tls_dir": "/no/such/folder"}, {"no_such": 1}):
        with pytest.raises(InvalidArgument, match=r"transfer_listen|/no/such/folder|no_such"):
            async with open_store("redis://127.0.0.1:1/0", **settings):
                pass
    with pytest.raises(InvalidArgument, match="not a Redis URL"):
        async with open_store("http://x"):
            pass


async def test_a_client_reads_the_copy_in_its_zone(redis_url: str) -> None:
    record = NodeRecord("kv-0", "0" * 32, "10.0.0.1:1", zone="east")
    for zone, away in (("east", 1), ("west", 2), ("", 2)):
        async with open_store(redis_url, zone=zone) as store:
            assert store._cost([record])(record)[0] == away
            here = replace(record, address=f"{store._host}:1")
            assert store._cost([here])(here)[0] == 0
