"""Store nodes and their client: reads return what was put, despite deaths, timeouts, evictions and restarts."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.errors import PinyonError
from pinyon.core.request import RequestClass
from pinyon.eviction import Traits
from pinyon.store.kv_memory import KvMemory
from pinyon.store.metadata import StoreMetadata
from pinyon.store.records import NodeRecord, entry_of
from pinyon.store.runs import Run
from pinyon.store.writer import PutOutcome
from pinyon.transfer import Opcode, Reason
from tests.integration.conductor_parts import World
from tests.integration.kvstore_parts import (
    OBJECT,
    READ,
    STORE,
    Client,
    Node,
    acquire,
    call,
    client_of,
    content,
    end,
    key,
    release,
    running_node,
    settled,
    start,
)
from tests.waiting import WAIT_S, eventually

CAPACITY = (1 << 20) // OBJECT  # objects in a node of 1 MiB


async def test_the_class_of_a_put_stays_with_its_objects(node: Node, client: Client) -> None:
    request = RequestClass("file", 3, "s", "u", -1, 1.5, "anna", ("eu-west",))
    result = await client.store.put(client.fill([1, 2]), OBJECT, WAIT_S, request_class=request)
    assert result.count(PutOutcome.STORED) == 2
    lease, *_ = await node.node.acquire([key(1), key(2)], 1.0, allow_gaps=False)
    assert [held.traits for _, held in lease.blocks] == [Traits("file/3", "anna")] * 2
    node.node.release(lease.lease_id)


async def test_put_get_exists_remove_over_two_nodes(redis_url: str) -> None:
    async with (
        running_node(redis_url, "kv-0", pool_mib=2) as first,
        running_node(redis_url, "kv-1", pool_mib=2) as second,
        client_of(redis_url) as client,
    ):
        assert [node.node_id for node in await client.store.nodes()] == ["kv-0", "kv-1"]
        for begin in range(0, 24, 4):
            await client.stored(range(begin, begin + 4))
        await client.until_listed(range(24))
        assert len(first.node.table) % 4 == len(second.node.table) % 4 == 0, "one put goes to one node"
        assert len(first.node.table)
        assert len(second.node.table)
        assert await client.get([*range(24), 99]) == [True] * 24 + [False]
        asked = kvstore_pb2.ExistsRequest(keys=b"".join(map(key, (0, 99, 23))))
        answers = [await call(node.address, STORE, "Exists", asked) for node in (first, second)]
        assert [any(each) for each in zip(*(reply.exists for reply in answers), strict=True)] == [True, False, True]
        assert await client.remove([0, 99, 23]) == 2
        await client.until_listed([0, 23], replicas=0)  # a run that still begins with one of them would be a miss
        assert await client.get([0, 1, 23]) == [False, True, False]
        await eventually(lambda: first.nothing_is_left() and second.nothing_is_left(), "leases and puts are over")
        await eventually(lambda: first.figure("listed_blocks") + second.figure("listed_blocks") == 22, "they know it")


async def test_what_the_store_has_is_not_sent_again(node: Node, client: Client) -> None:
    await client.stored([1, 2])
    await client.until_listed([1, 2])
    result = await client.put([1, 2, 3, 3])
    expected = [PutOutcome.EXISTS, PutOutcome.EXISTS, PutOutcome.STORED, PutOutcome.EXISTS]
    assert list(result) == expected
    assert node.figure("put_objects_total") == 3
    assert node.figure("put_bytes_total") == 3 * OBJECT
    # Until the metadata has the object, the node itself says that it exists.
    await client.store.metadata._redis.hdel("pinyon:v2:{kv-0}:blocks", key(1))
    assert await client.put([1]) == (PutOutcome.EXISTS,)
    assert node.figure("put_objects_total") == 3


async def test_another_put_that_is_not_over_does_not_count_as_stored(node: Node, client: Client) -> None:
    other = await start(node, 1, timeout_ms=60_000)
    result = await client.put([1, 2])
    assert result == (PutOutcome.BEING_PUT, PutOutcome.STORED)
    # The other put gives up.
    await end(node, other)
    await client.stored([1])


async def test_puts_of_dead_clients_end_and_make_place_for_others(redis_url: str) -> None:
    dead = 64
    async with running_node(redis_url, open_puts_max=dead) as node, client_of(redis_url) as client:
        for number in range(dead):
            await start(node, 100 + number, object_bytes=64, timeout_ms=2_000)
        (outcome,) = await client.put([1])
        assert outcome is PutOutcome.FAILED or node.figure("expired_puts_total"), "there was a place"

        async def stored() -> bool:
            return await client.put([1]) in ((PutOutcome.STORED,), (PutOutcome.EXISTS,))

        await eventually(stored, "a place for a put")  # a node that is busy is not avoided
        await eventually(node.nothing_is_left, "all puts are over")
        assert node.figure("expired_puts_total") == dead


async def test_many_more_puts_than_there_are_places_are_served_in_turn(redis_url: str) -> None:
    puts, places, size = 200, 16, 64
    async with running_node(redis_url, open_puts_max=places) as node, client_of(redis_url, 1) as client:
        left = set(range(puts))

        async def put(number: int) -> None:
            pieces = KvMemory.whole(client.region, size).pieces(0)
            (outcome,) = await client.store.put([(key(number), pieces)], size, WAIT_S)
            if outcome is PutOutcome.STORED:
                left.discard(number)
            else:
                assert outcome is PutOutcome.FAILED  # no place, since the node is busy, which is no reason to avoid it

        async def all_stored() -> bool:
            await asyncio.gather(*map(put, sorted(left)))
            return not left

        await eventually(all_stored, "every put has had its turn")
        assert len(node.node.table) == puts
        assert node.figure("expired_puts_total") == 0
        await eventually(node.nothing_is_left, "no put is left")


async def test_puts_of_one_run_go_to_one_node(redis_url: str) -> None:
    async with (
        running_node(redis_url, "kv-0") as first,
        running_node(redis_url, "kv-1") as second,
        client_of(redis_url) as client,
    ):
        run = Run()
        for number in range(8):
            result = await client.store.put(client.fill([number]), OBJECT, WAIT_S, runs=[run])
            assert result == (PutOutcome.STORED,)
        assert sorted((len(first.node.table), len(second.node.table))) == [0, 8]


async def test_nobody_reads_wrong_bytes_while_everything_is_evicted(redis_url: str) -> None:
    rng = random.Random(7)
    numbers = range(4 * CAPACITY)
    async with running_node(redis_url) as node, client_of(redis_url) as writer:
        done = asyncio.Event()

        async def write() -> None:
            for _ in range(30):
                await writer.put([rng.choice(numbers) for _ in range(3)])
            done.set()

        async def read(client: Client, rng: random.Random) -> int:
            whole = 0
            while not done.is_set():
                whole += sum(await client.get([rng.choice(numbers) for _ in range(4)]))  # checks the content
            return whole

        async with client_of(redis_url, 4) as one, client_of(redis_url, 4) as other, asyncio.TaskGroup() as group:
            group.create_task(write())
            readers = [group.create_task(read(each, random.Random(seed))) for seed, each in enumerate((one, other))]
        assert sum(reader.result() for reader in readers) > 0
        assert node.figure("evicted_objects_total") > CAPACITY
        await eventually(node.nothing_is_left, "leases and puts are over")


async def test_a_sweep_that_fails_pauses_before_the_next(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(overdue_leases=Mock(side_effect=KeyError), next_deadline_s=lambda: 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(node.node, "table", broken)
        with pytest.raises(KeyError):
            node.node._sweep()
    assert node.node._next_end.due - asyncio.get_running_loop().time() > 0.5


async def test_what_is_leased_is_neither_evicted_nor_overwritten(node: Node, client: Client) -> None:
    await client.stored([0, 1])
    lease = await acquire(node, 0, 1, 77)
    assert [block.index for block in lease.blocks] == [0, 1]
    for first in range(2, 2 + 2 * CAPACITY, 8):
        await client.stored(range(first, first + 8))
    result = await client.put(range(200, 200 + CAPACITY))
    assert result.count(PutOutcome.NO_SPACE) == 2
    await client.remove([1])
    # The lease still reads what it was granted, even after a removal.
    for block in lease.blocks:
        assert (await client.move(Opcode.READ, lease, block.offset_bytes, slot=block.index)).ok
    assert [client.slot(slot) for slot in range(2)] == [content(0), content(1)]
    assert await release(node, lease)
    assert node.nothing_is_left()
    await client.stored(range(300, 300 + CAPACITY))


async def test_a_lease_ends_by_its_time(redis_url: str) -> None:
    async with running_node(redis_url, lease_max_s=0.05) as node, client_of(redis_url) as client:
        await client.stored([0])
        lease = await acquire(node, 0)
        assert lease.lease_ms == 50
        await eventually(node.nothing_is_left, "the lease is over")
        assert not await release(node, lease)
        assert node.figure("expired_leases_total") == 1


async def test_a_dead_writers_room_is_freed_and_its_late_write_refused(node: Node, client: Client) -> None:
    put = await start(node, *range(CAPACITY), timeout_ms=60_000)
    assert node.figure("reserved_objects") == CAPACITY
    await end(node, put)
    put = await start(node, *range(CAPACITY), timeout_ms=50)
    assert {slot.state for slot in put.slots} == {kvstore_pb2.PUT_SLOT_STATE_RESERVED}
    # The writer is silent until its put times out.
    await eventually(lambda: node.figure("open_puts") == 0, "the put timed out")
    assert node.figure("expired_puts_total") == 1
    assert node.figure("used_bytes") == 0
    # Others get the room …
    await client.stored(range(50, 50 + CAPACITY))
    # … and the late writer can neither write to it nor end its put.
    late = await client.move(Opcode.WRITE, put, put.slots[0].offset_bytes)
    assert late.reason is Reason.UNKNOWN_REGION
    with pytest.raises(PinyonError) as caught:
        await end(node, put, commit=True)
    assert caught.value.grpc_code == "NOT_FOUND"
    await client.until_listed(range(50, 50 + CAPACITY))
    assert await client.get(range(50, 50 + CAPACITY)) == [True] * CAPACITY
    assert await client.get([0]) == [False]
    await eventually(node.nothing_is_left, "leases and puts are over")


async def test_a_cancelled_put_gives_its_room_back(node: Node, client: Client) -> None:
    objects = client.fill(range(8))
    cancelled = 0
    for turns in range(60):  # cancelled at many different points
        put = asyncio.create_task(client.store.put(objects, OBJECT, WAIT_S))
        for _ in range(turns):
            await asyncio.sleep(0)
        put.cancel()
        await asyncio.wait({put})
        cancelled += put.cancelled()
        await eventually(node.nothing_is_left, "nothing is reserved")
        await client.remove(range(8))
    assert cancelled > 10


async def test_a_cancelled_get_gives_its_leases_back(node: Node, client: Client) -> None:
    await client.stored(range(8))
    keys, places = [key(number) for number in range(8)], [client.kv.pieces(slot) for slot in range(8)]
    cancelled = 0
    for turns in range(60):
        fetch = asyncio.create_task(client.reader.read(node.address, keys, places, OBJECT, WAIT_S))
        for _ in range(turns):
            await asyncio.sleep(0)
        fetch.cancel()
        await asyncio.wait({fetch})
        cancelled += fetch.cancelled()
        await settled(client.reader)
        await eventually(node.nothing_is_left, "nothing is leased")
    assert cancelled > 10


async def test_a_stopped_node_is_not_found_and_leaves_no_redis_keys(redis_url: str) -> None:
    async with client_of(redis_url) as client:
        async with running_node(redis_url):
            await client.stored([1, 2])
            await client.until_listed([1, 2])
        metadata = client.store.metadata
        assert await metadata.nodes() == []
        assert await metadata.names() == []
        assert await metadata._redis.keys() == []
        client.forget_nodes()
        assert await client.put([1]) == (PutOutcome.FAILED,)
        assert await client.get([1]) == [False]


async def test_what_an_earlier_life_listed_is_void_and_gone(redis_url: str) -> None:
    metadata = StoreMetadata(redis_url, timeout_s=WAIT_S)
    dead = NodeRecord("kv-0", "0" * 32, "127.0.0.1:9")
    await metadata.register(dead, WAIT_S)
    await metadata.change(dead.life, [], [(key(number), entry_of(OBJECT)) for number in range(20)])
    assert [len(replicas) for replicas in await metadata.locate([key(0)])] == [1]
    async with running_node(redis_url), client_of(redis_url) as client:
        assert await client.listed(range(20)) == [0] * 20
        assert await client.get([0, 1]) == [False, False]
        await client.stored([0, 1])
        await client.until_listed([0, 1])
        assert await metadata.listed("kv-0") == {key(0), key(1)}
        assert await client.get([0, 1]) == [True, True]
    await metadata.close()


async def test_a_process_that_took_the_name_stops_the_older_one(redis_url: str) -> None:
    async with (
        running_node(redis_url, node_lease_s=3.0) as older,  # notices at its next renewal
        running_node(redis_url) as newer,
        client_of(redis_url) as client,
    ):
        await asyncio.wait_for(older.context.stopping.wait(), WAIT_S)
        assert not newer.context.stopping.is_set()
        (record,) = await client.store.nodes()
        assert record.boot_id == newer.node.boot_id


async def test_a_dead_node_is_skipped_and_then_avoided(redis_url: str) -> None:
    async with running_node(redis_url, "kv-1") as node, client_of(redis_url) as client:
        dead = NodeRecord("kv-0", "0" * 32, "127.0.0.1:9", 1 << 20)
        await client.store.metadata.register(dead, WAIT_S)
        await client.store.metadata.change(dead.life, [], [(key(500), entry_of(OBJECT))])
        # Numbers whose first choice is the dead node, and others.
        for number in range(12):
            await client.stored([number])
        assert len(node.node.table) == 12
        assert len(client.store._avoidance._until) == 1
        await client.until_listed([3])
        assert await client.get([500, 3]) == [False, True]


async def test_bad_requests_are_refused_by_field(node: Node) -> None:
    wrong = common_pb2.RequestClass(kind="x" * 33)
    bad = [
        (STORE, "PutStart", kvstore_pb2.PutStartRequest(keys=b"short", object_bytes=1), "keys"),
        (STORE, "PutStart", kvstore_pb2.PutStartRequest(keys=b"", object_bytes=1), "keys"),
        (STORE, "PutStart", kvstore_pb2.PutStartRequest(keys=bytes(16 * 4097), object_bytes=1), "keys"),
        (STORE, "PutStart", kvstore_pb2.PutStartRequest(keys=bytes(16), object_bytes=0), "object_bytes"),
        (STORE, "PutStart", kvstore_pb2.PutStartRequest(keys=bytes(16), object_bytes=1 << 40), "object_bytes"),
        (
            STORE,
            "PutStart",
            kvstore_pb2.PutStartRequest(keys=bytes(16), object_bytes=1, request_class=wrong),
            "request_class.kind",
        ),
        (STORE, "Exists", kvstore_pb2.ExistsRequest(keys=bytes(17)), "keys"),
        (STORE, "Remove", kvstore_pb2.RemoveRequest(keys=bytes(15)), "keys"),
        (READ, "Acquire", kvstore_pb2.AcquireRequest(keys=bytes(16 * 4097)), "keys"),
        (READ, "Acquire", kvstore_pb2.AcquireRequest(keys=bytes(16), request_class=wrong), "request_class.kind"),
    ]
    for stub, method, request, field in bad:
        with pytest.raises(PinyonError) as caught:
            await call(node.address, stub, method, request)
        assert (caught.value.grpc_code, caught.value.field) == ("INVALID_ARGUMENT", field)
    status = await call(node.address, STORE, "GetNodeStatus", kvstore_pb2.GetNodeStatusRequest())
    assert (status.node_id, status.capacity_bytes, status.used_bytes) == ("kv-0", 1 << 20, 0)
    assert node.nothing_is_left()


async def test_the_conductor_knows_what_the_node_holds(redis_url: str) -> None:
    async with World(index_stride_tokens=1) as world:  # no worker tells the conductor the length of blocks

        async def until_held(numbers: list[int], blocks: int) -> None:
            lookup = conductor_pb2.LookupBlocksRequest(block_keys=b"".join(map(key, numbers)))

            async def held() -> bool:
                reply = await world.stub.LookupBlocks(lookup)
                found = {holder.instance_id: holder.prefix_blocks for holder in reply.holders}
                return found == ({"kv-0": blocks} if blocks else {})

            await eventually(held, f"the conductor knows of {blocks} leading blocks")

        async with running_node(redis_url, conductor=world.address) as node, client_of(redis_url) as client:
            await eventually(lambda: node.figure("report_sessions"), "registered")
            await client.stored([1, 2, 3])
            await until_held([1, 2, 3, 4], 3)
            await client.remove([2])
            await until_held([1, 2, 3, 4], 1)
            (instance,) = (await world.names()).values()
            assert instance.info.role == common_pb2.ROLE_STORE
            assert (instance.info.address, instance.load.cached_blocks) == (node.address, 2)
        await until_held([1], 0)
