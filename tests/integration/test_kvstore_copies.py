"""Copies of objects at several nodes: put, changed, read if another one fails, and made before a node leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound
from pinyon.core.orders import FetchSpan
from pinyon.core.request import RequestClass
from pinyon.runtime.channel import open_channel
from pinyon.runtime.interceptors import error_from_rpc
from pinyon.store.reader import ReadTerms
from pinyon.store.spans import find_spans, read_span
from pinyon.store.sync_store import SyncStore
from pinyon.store.writer import PutOutcome
from services.kvstore.copier import Copier
from tests.integration.conductor_parts import World
from tests.integration.kvstore_parts import OBJECT, STORE, Node, call, client_of, content, key, running_node, start
from tests.waiting import WAIT_S, eventually

THREE = ("kv-0", "kv-1", "kv-2")
NUMBERS = range(1, 9)


@contextlib.asynccontextmanager
async def three_nodes(redis_url: str, **settings: Any) -> AsyncIterator[dict[str, Node]]:
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(running_node(redis_url, name, **settings)) for name in THREE}


def holders(nodes: dict[str, Node], number: int) -> list[str]:
    return [name for name, node in nodes.items() if key(number) in node.node.table]


async def replicate(node: Node, target: str, *numbers: int) -> int:
    request = kvstore_pb2.ReplicateRequest(keys=b"".join(map(key, numbers)), target=target)
    return int((await call(node.address, STORE, "Replicate", request)).copied)


async def drain(node: Node) -> list[kvstore_pb2.DrainResponse]:
    async with open_channel(node.address) as channel:
        try:
            return [each async for each in STORE(channel).Drain(kvstore_pb2.DrainRequest(), timeout=WAIT_S)]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


async def test_a_put_with_replicas_makes_that_many_copies(redis_url: str) -> None:
    async with three_nodes(redis_url) as nodes, client_of(redis_url) as client:
        outcomes = await client.store.put(client.fill(NUMBERS), OBJECT, WAIT_S, replicas=2, parts=4)
        assert set(outcomes) == {PutOutcome.STORED}
        await client.until_listed(NUMBERS, replicas=2)
        for number in NUMBERS:
            copies = [nodes[name].node.table.in_memory(key(number)) for name in holders(nodes, number)]
            assert len({each.checksums for each in copies}) == 1
            assert len(copies[0].checksums) == 4 * 8, "checksums are the writer's"
        assert await client.store.change_replica([key(each) for each in NUMBERS], 3, WAIT_S) == (len(NUMBERS), 0, 0)
        await client.until_listed(NUMBERS, replicas=3)
        assert await client.store.change_replica([key(each) for each in NUMBERS], 1, WAIT_S) == (0, 0, 16)
        await client.until_listed(NUMBERS, replicas=1)
        assert await client.get(NUMBERS) == [True] * len(NUMBERS)
        with pytest.raises(InvalidArgument, match="1 to 8 copies"):
            await client.store.change_replica([key(1)], 0, WAIT_S)


async def test_a_copy_keeps_class_and_place_of_its_object(redis_url: str) -> None:
    async with three_nodes(redis_url) as nodes, client_of(redis_url) as client:
        of = RequestClass("chat", 3, tenant="anna")
        await client.store.put(client.fill([1, 2]), OBJECT, WAIT_S, request_class=of, places=[7, 8])
        (source,) = holders(nodes, 1)
        target = next(name for name in THREE if name != source)
        assert await replicate(nodes[source], target, 1, 2, 99) == 2
        assert await replicate(nodes[source], target, 1, 2) == 2, "they are there"
        for number in (1, 2):
            first, second = (nodes[name].node.table.in_memory(key(number)) for name in (source, target))
            assert (first.traits, first.place) == (second.traits, second.place) == (("chat/3", "anna"), 6 + number)
        for name, error in ((source, InvalidArgument), ("kv-9", NotFound)):
            with pytest.raises(error):
                await replicate(nodes[source], name, 1)
        await eventually(nodes[source].nothing_is_left, "copying is over")


async def test_of_several_copies_the_near_and_idle_one_is_read(redis_url: str) -> None:
    async with (
        running_node(redis_url, "kv-0", zone="east"),
        running_node(redis_url, "kv-1", zone="west"),
        running_node(redis_url, "kv-2", zone="west"),
        client_of(redis_url) as client,
    ):
        await client.store.put(client.fill(NUMBERS), OBJECT, WAIT_S, replicas=3)
        await client.until_listed(NUMBERS, replicas=3)
        address = {node.node_id: node.address for node in await client.store.nodes()}

        async def named(zone: str = "", host: str = "", times: int = 20) -> set[str]:
            store = client.store
            store._zone, store._host = zone, host
            runs = [await store.leading([key(each) for each in NUMBERS], OBJECT, WAIT_S) for _ in range(times)]
            assert all([count for _, count in run] == [len(NUMBERS)] for run in runs)
            return {node.node_id for ((node, _),) in runs}

        assert await named("east") == {"kv-0"}
        assert await named("west", times=60) == {"kv-1", "kv-2"}, "both in turn"
        assert await named(times=60) == set(THREE)
        assert await named("east", "127.0.0.1", times=60) == set(THREE), "all are on this host"
        client.channels.reads[address["kv-1"]] += 1
        assert await named("west") == {"kv-2"}


async def test_gets_of_one_object_spread_over_its_copies(redis_url: str) -> None:
    async with three_nodes(redis_url) as nodes, client_of(redis_url) as client:
        await client.store.put(client.fill([1]), OBJECT, WAIT_S, replicas=3)
        await client.until_listed([1], replicas=3)
        for _ in range(60):
            assert await client.store.get([(key(1), client.kv.pieces(1))], OBJECT, WAIT_S) == [True]
        assert all(node.figure("hit_blocks_total") for node in nodes.values())


async def test_a_read_falls_over_to_another_copy(redis_url: str) -> None:
    async with three_nodes(redis_url) as nodes, client_of(redis_url) as client:
        await client.store.put(client.fill(NUMBERS), OBJECT, WAIT_S, replicas=2)
        await client.until_listed(NUMBERS, replicas=2)
        keys = [key(each) for each in NUMBERS]
        (span,) = await find_spans(client.store, keys, OBJECT, WAIT_S)
        nodes[span.source_id].node.remove(keys[2:])  # the directory does not know yet

        async def read(span: FetchSpan) -> int:
            part = slice(span.first, span.end)
            places = [client.kv.pieces(slot) for slot in range(len(keys))][part]
            rest = (OBJECT, WAIT_S, WAIT_S, ReadTerms())
            return await read_span(
                client.reader, Avoidance(), asyncio.get_running_loop().time, span, keys[part], places, *rest
            )

        assert await read(span) == 2
        (other,) = await find_spans(client.store, keys[2:], OBJECT, WAIT_S, 2, {span.address})
        assert other.source_id != span.source_id
        assert await read(other) == len(keys) - 2
        assert [client.slot(slot) for slot in range(len(keys))] == [content(number) for number in NUMBERS]


async def test_what_a_node_lacks_is_read_from_another_by_engines(redis_url: str) -> None:
    async with three_nodes(redis_url) as nodes, client_of(redis_url) as client:
        await client.store.put(client.fill(NUMBERS), OBJECT, WAIT_S, replicas=2)
        await client.until_listed(NUMBERS, replicas=2)
        keys, places = [key(each) for each in NUMBERS], [client.kv.pieces(slot) for slot in range(len(NUMBERS))]
        spans = await find_spans(client.store, keys, OBJECT, WAIT_S, 5)
        (span,) = spans
        nodes[span.source_id].node.remove(keys[3:])  # the directory does not know yet
        client.memory[:] = bytes(len(client.memory))
        store = SyncStore(None, client.store, client.reader)  # type: ignore[arg-type]  # it is asked on this loop
        arrived = await store._read(spans, keys, places, OBJECT, WAIT_S, ReadTerms())
        assert arrived == [len(keys)]
        assert [client.slot(slot) for slot in range(len(keys))] == [content(number) for number in NUMBERS]
        for node in nodes.values():
            node.node.remove(keys[6:])
        assert await store._read(spans, keys, places, OBJECT, WAIT_S, ReadTerms()) == [6]


async def test_a_drain_moves_what_fits_of_memory_and_disk(redis_url: str, tmp_path: Path) -> None:
    disk = {"disk_dir": str(tmp_path), "disk_mib": 64, "pool_mib": 1}
    async with running_node(redis_url, "kv-0", **disk) as first, client_of(redis_url) as client:
        for number in range(48):
            await client.stored([number])
            await eventually(lambda: first.figure("disk_unsaved_objects") == 0, "the disk has it")
        async with running_node(redis_url, "kv-1", pool_mib=2) as second:
            last = (await drain(first))[-1]
            assert (last.objects, last.copied, last.lost) == (48, 32, 16)
            moved = {number for number in range(48) if key(number) in second.node.table}
            assert len(moved) == 32
            assert {45, 46, 47} <= moved, "the last used first"


async def test_a_drained_node_has_no_last_copy(redis_url: str) -> None:
    async with three_nodes(redis_url) as nodes, client_of(redis_url) as client:
        for number in NUMBERS:
            await client.stored([number])
        await client.until_listed(NUMBERS)
        leaving = next(name for name in THREE if any(name in holders(nodes, number) for number in NUMBERS))
        its = [number for number in NUMBERS if leaving in holders(nodes, number)]
        keep = next(name for name in THREE if name != leaving)
        await replicate(nodes[leaving], keep, its[0])
        await client.until_listed(its[:1], replicas=2)
        progress = await drain(nodes[leaving])
        last = progress[-1]
        assert (last.copied, last.seen, last.objects, last.lost) == (len(its) - 1, len(its), len(its), 0)
        assert all(len(holders(nodes, number)) >= 2 for number in its)
        client.forget_nodes()
        assert await client.put([100]) == (PutOutcome.STORED,)
        assert holders(nodes, 100) != [leaving]
        assert await client.get(NUMBERS) == [True] * len(NUMBERS), "it is still read from"
        with pytest.raises(FailedPrecondition, match="drained"):
            await drain(nodes[leaving])


async def test_a_full_pool_keeps_the_hottest_of_a_drained_node(redis_url: str) -> None:
    async with running_node(redis_url, "kv-0", pool_mib=1) as first, client_of(redis_url) as client:
        for number in range(16):
            await client.stored([number])
        await client.get([3, 4])
        await first.node.pin([key(0)], 0.0)
        async with running_node(redis_url, "kv-1", pool_mib=1, node_lease_s=0.9) as second:
            client.forget_nodes()
            for number in range(100, 108):
                request = [key(number)], OBJECT
                put_id, _, _ = second.node.put_start(*request, 10.0)
                await second.node.put_end(put_id, commit=True)

            async def told() -> bool:
                return [each.room.free_bytes for each in await client.store.metadata.nodes()][1] == 8 * OBJECT

            await eventually(told, "its room is known")
            last = (await drain(first))[-1]
            assert (last.objects, last.copied, last.lost) == (16, 10, 6), "16 of 24 objects stay"
            moved = {number for number in range(16) if key(number) in second.node.table}
            assert {0, 3, 4, 15} <= moved, "the pinned and the last used"


async def test_a_drain_finds_room_for_all_that_has_no_copy(redis_url: str) -> None:
    """Half of the objects are at the other node already, which has room for the other half and no more."""
    numbers = range(16)
    async with running_node(redis_url, "kv-0") as first, client_of(redis_url) as client:
        await client.stored(numbers)
        async with running_node(redis_url, "kv-1", node_lease_s=0.9) as second:
            assert await replicate(first, "kv-1", *numbers[:8]) == 8
            await client.until_listed(numbers[:8], replicas=2)

            async def told() -> bool:
                client.forget_nodes()
                room = {node.node_id: node.room.free_bytes for node in await client.store.nodes()}
                return room["kv-1"] == 8 * OBJECT

            await eventually(told, "its room is known")
            last = (await drain(first))[-1]
            assert (last.objects, last.seen, last.copied, last.lost) == (16, 16, 8, 0)
            assert all(key(number) in second.node.table for number in numbers)


async def test_a_drain_whose_caller_leaves_is_undone(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = asyncio.Event()

    async def copy(*_: object) -> None:
        copying.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Copier, "copy", copy)
    async with running_node(redis_url, "kv-0") as node, client_of(redis_url) as client:
        await client.stored(NUMBERS)
        async with running_node(redis_url, "kv-1"):
            draining = asyncio.ensure_future(drain(node))
            await copying.wait()
            refused = await start(node, 100)
            assert refused.slots[0].state == kvstore_pb2.PUT_SLOT_STATE_NO_SPACE
            assert refused.no_space == "the node is to leave, and takes no puts"
            draining.cancel()
            await eventually(lambda: not node.node.leaving, "the drain is undone")
            assert (await start(node, 100)).slots[0].state == kvstore_pb2.PUT_SLOT_STATE_RESERVED
            with contextlib.suppress(asyncio.CancelledError):
                await draining


async def test_the_only_node_is_not_drained(redis_url: str) -> None:
    async with running_node(redis_url) as node, client_of(redis_url) as client:
        with pytest.raises(FailedPrecondition, match="no other store node"):
            await drain(node)
        client.forget_nodes()
        assert await client.put([1]) == (PutOutcome.STORED,)


async def test_the_conductor_has_a_hot_prefix_copied(redis_url: str) -> None:
    prefix, cold = range(1, 21), 21
    async with (
        World(index_stride_tokens=1) as world,
        three_nodes(redis_url, pool_mib=32, conductor=world.address) as nodes,
        client_of(redis_url) as client,
    ):
        for node in nodes.values():
            await eventually(lambda node=node: node.figure("report_sessions"), "registered")
            node.node.reads.window_s = 1.0
        await client.stored([*prefix, cold])
        await client.until_listed([*prefix, cold])
        (owner,) = holders(nodes, 1)

        async def copied() -> bool:
            assert all(await client.get(prefix))
            return len(holders(nodes, 1)) == 3

        await eventually(copied, "all nodes have the beginning of the prefix")
        assert holders(nodes, cold) == [owner], "a block that nobody read was copied"
        assert world.metric("copy_orders_total") >= 2
        await client.until_listed([1], replicas=3)
        before = {name: node.figure("hit_blocks_total") for name, node in nodes.items()}
        for _ in range(60):
            assert all(await client.get(prefix))
        assert all(node.figure("hit_blocks_total") > before[name] for name, node in nodes.items()), "copies are read"


async def test_second_copies_make_room_for_colder_last_ones(redis_url: str) -> None:
    async with (
        running_node(redis_url, "kv-0") as first,
        running_node(redis_url, "kv-1") as second,
        client_of(redis_url) as client,
    ):
        nodes, fresh = {"kv-0": first, "kv-1": second}, count(200)

        async def put(node: Node, *numbers: int) -> None:
            put_id, _, _ = node.node.put_start([key(each) for each in numbers], OBJECT, WAIT_S)
            await node.node.put_end(put_id, commit=True)

        for number, node in enumerate(nodes.values()):
            await put(node, *range(100 + 8 * number, 108 + 8 * number))
        await client.store.put(client.fill(NUMBERS), OBJECT, WAIT_S, replicas=2)
        await client.until_listed(NUMBERS, replicas=2)

        def evicted() -> float:
            return sum(node.figure("evicted_copies_total") for node in nodes.values())

        while (before := evicted()) < len(NUMBERS):  # each time, some of either node, until it has those it is best for
            for node in nodes.values():
                while node.node.room().free_bytes:
                    await put(node, next(fresh))
            await eventually(lambda before=before: evicted() > before, "second copies go")
        await client.until_listed(NUMBERS, replicas=1)
        await client.until_listed(range(100, 116), replicas=1)
        assert await client.get(NUMBERS) == [True] * len(NUMBERS)
        await eventually(lambda: all(node.nothing_is_left() for node in nodes.values()), "reading is over")
