"""The entries in Redis: shared with unrelated keys, lost and found again, and never trusted too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from redis.asyncio import Redis

from launch.process import ServiceProcess
from launch.redis_server import find_redis
from pinyon.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from pinyon.store.metadata import BATCH, StoreMetadata
from pinyon.store.records import Life, NodeRecord, Replica, Tier, entry_of
from services.kvstore.settings import KvStoreSettings
from tests.integration.kvstore_parts import client_of, end_redis, key, running_node
from tests.redis_groups import ClusterOfThree
from tests.tcp_server import tcp_server
from tests.waiting import WAIT_S, eventually

BOOT, OTHER = "a" * 32, "b" * 32
NODE = NodeRecord("kv-0", BOOT, "127.0.0.1:1", 1 << 20)
NEWER = NodeRecord("kv-0", OTHER, "127.0.0.1:2")
"""Another process that takes the name of ``NODE``."""
NODES = "pinyon:v2:nodes"
RECORD, LIFE, BLOCKS = "pinyon:v2:{kv-0}:record", "pinyon:v2:{kv-0}:life", "pinyon:v2:{kv-0}:blocks"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterOfThree]:
    with ClusterOfThree() as group:
        yield group


@pytest.fixture(params=["one server", "cluster"])
async def metadata(request: pytest.FixtureRequest) -> AsyncIterator[StoreMetadata]:
    """The metadata on one server and on a Redis Cluster, empty."""
    url = request.getfixturevalue("redis_server" if request.param == "one server" else "cluster").url
    metadata = StoreMetadata(url, timeout_s=WAIT_S)
    await metadata._redis.flushall()
    yield metadata
    await metadata.close()


@pytest.fixture
async def on_one(redis_url: str) -> AsyncIterator[StoreMetadata]:
    """The metadata on one server, empty."""
    metadata = StoreMetadata(redis_url, timeout_s=WAIT_S)
    yield metadata
    await metadata.close()


def entries(*numbers: int, size: int = 5) -> list[tuple[bytes, bytes]]:
    return [(key(number), entry_of(size)) for number in numbers]


async def known(metadata: StoreMetadata, *numbers: int) -> None:
    """Registers ``NODE`` with these blocks."""
    await metadata.register(NODE, WAIT_S)
    await metadata.change(NODE.life, [], entries(*numbers))


async def copies(metadata: StoreMetadata, *numbers: int) -> list[int]:
    return [len(each) for each in await metadata.locate([key(number) for number in numbers])]


async def test_replicas_of_live_nodes_are_found_in_batches(metadata: StoreMetadata) -> None:
    count = 2 * BATCH + 3
    keys = [key(number) for number in range(count)]
    other = NodeRecord("kv-1", OTHER, "127.0.0.1:2")
    await metadata.register(NODE, WAIT_S)
    await metadata.register(other, WAIT_S)
    await metadata.change(NODE.life, [], entries(*range(count), size=100))
    await metadata.change(other.life, [], [(keys[0], entry_of(100)), (keys[-1], entry_of(7, Tier.DISK, "a tenant"))])
    located = await metadata.locate([*keys, key(-1 % 2**32)])
    assert [len(each) for each in located] == [2] + [1] * (count - 2) + [2, 0]
    assert located[count - 1] == [Replica(NODE, 100), Replica(other, 7, Tier.DISK)]
    await metadata.change(NODE.life, keys, [])
    assert sum(map(len, await metadata.locate(keys))) == 2
    await metadata.leave(other)
    assert sum(map(len, await metadata.locate(keys))) == 0
    assert await metadata.nodes() == [NODE]
    assert await metadata.names() == ["kv-0"]


async def test_a_record_ends_with_its_lease_and_says_so(metadata: StoreMetadata) -> None:
    await metadata.register(NODE, 0.02)

    async def gone() -> bool:
        return not await metadata.nodes()

    await eventually(gone, "the record is gone")
    assert await metadata.renew(NODE, WAIT_S) is False
    assert await metadata.renew(NODE, WAIT_S) is True


async def test_a_name_has_one_life(metadata: StoreMetadata) -> None:
    await known(metadata, 0)
    await metadata.register(NEWER, WAIT_S)
    assert await metadata.nodes() == [NEWER]
    assert await copies(metadata, 0) == [0], "a new life begins with nothing"
    with pytest.raises(FailedPrecondition, match="kv-0"):
        await metadata.renew(NODE, WAIT_S)
    with pytest.raises(FailedPrecondition, match="kv-0"):
        await metadata.change(NODE.life, [], entries(1))
    await metadata.change(NEWER.life, [], entries(2))
    await metadata.leave(NODE)  # the record belongs to the newer life
    assert await metadata.nodes() == [NEWER]
    assert await copies(metadata, 0, 1, 2) == [0, 0, 1]


async def test_a_node_without_a_record_is_forgotten_at_once(metadata: StoreMetadata) -> None:
    await known(metadata, *range(BATCH + 10))
    assert not await metadata.forget("kv-0"), "it is alive"
    assert await copies(metadata, 0) == [1]
    await metadata._redis.delete(RECORD)  # as when its lease has ended
    assert await metadata.names() == ["kv-0"]
    assert await metadata.forget("kv-0")
    assert await metadata.names() == []
    assert await metadata.listed("kv-0") == set()
    assert not await metadata.renew(NODE, WAIT_S), "it is back, and its entries are not as it left them"
    assert await metadata.names() == ["kv-0"]
    await metadata.restart(NODE.life)
    await metadata.change(NODE.life, [], entries(0))
    assert await metadata.renew(NODE, WAIT_S)


async def test_foreign_values_are_ignored_and_counted(metadata: StoreMetadata) -> None:
    raw = metadata._redis
    await known(metadata, 0, 1, 2)
    values = {key(3): b"short", key(4): b"m0000000000!", key(5): b"x00000000005", key(6): b"m00000000000"}
    await raw.hset(BLOCKS, mapping={**values, b"not a key": b"m00000000005"})
    await raw.sadd("pinyon:v2:nodes", b"\xff\xfe", "kv 9", "kv-8", "kv-7")
    await raw.set("pinyon:v2:{kv-8}:record", "{not json")
    await raw.rpush("pinyon:v2:{kv-7}:record", "a list")
    assert await metadata.nodes() == [NODE]
    assert metadata.malformed == 4  # two names and two records
    assert [len(each) for each in await metadata.locate([key(at) for at in range(8)], [NODE])] == [1] * 3 + [0] * 5
    assert metadata.malformed == 4 + 3  # a short entry counts as none
    assert await metadata.listed("kv-0") == {key(number) for number in range(7)}


async def test_nobody_takes_back_a_name_that_was_taken(on_one: StoreMetadata) -> None:
    for turns in range(60):  # the newer life registers at many different points of the older one's renewal
        await on_one.register(NODE, WAIT_S)
        await on_one._redis.ping()
        renewal = asyncio.create_task(on_one.renew(NODE, WAIT_S))
        for _ in range(turns):
            await asyncio.sleep(0)
        await on_one.register(NEWER, WAIT_S)
        await asyncio.wait({renewal})
        assert await on_one.nodes() == [NEWER], f"after {turns} turns"
        assert renewal.exception() is None or isinstance(renewal.exception(), FailedPrecondition)


async def test_a_change_that_comes_late_changes_nothing(on_one: StoreMetadata, redis_url: str) -> None:
    """A change that was sent and given up: a frozen server applies it later."""
    await known(on_one, 0)
    await on_one.change(NODE.life, [key(0)], [])
    late = StoreMetadata(redis_url, timeout_s=WAIT_S)
    with pytest.raises(Unavailable, match="lost"):
        await late.change(NODE.life, [], entries(0))
    await late.close()
    assert await copies(on_one, 0) == [0]
    assert await on_one.renew(NODE, WAIT_S)


async def test_a_redis_that_lost_the_last_changes_is_noticed(metadata: StoreMetadata) -> None:
    raw = metadata._redis
    await known(metadata, 0)
    saved = {name: await raw.dump(name) for name in (RECORD, LIFE, BLOCKS)}
    await metadata.change(NODE.life, [key(0)], entries(1))

    async def fail_over() -> None:
        await raw.flushall()
        for name, value in saved.items():
            await raw.restore(name, round(WAIT_S * 1000), value)

    await fail_over()
    assert not await metadata.renew(NODE, WAIT_S)
    assert await metadata.listed("kv-0") == {key(0)}
    await metadata.change(NODE.life, [key(0)], entries(1))  # what the node does then: it lists everything again
    assert await metadata.renew(NODE, WAIT_S)
    await fail_over()
    with pytest.raises(Unavailable, match="lost"):
        await metadata.change(NODE.life, [], entries(2))
    await metadata.change(NODE.life, [], entries(1, 2))
    assert await metadata.renew(NODE, WAIT_S)


async def test_lost_entries_are_noticed_at_the_next_change(metadata: StoreMetadata) -> None:
    """A busy node changes entries between any two renewals; it must not take a lost table for the one it left."""
    await known(metadata, 0, 1, 2)
    await metadata.change(NODE.life, [key(0)], [])
    await metadata._redis.delete(BLOCKS)
    with pytest.raises(Unavailable, match="lost"):
        await metadata.change(NODE.life, [], entries(3))
    await metadata.restart(NODE.life)  # what the node does then: it lists everything again
    await metadata.change(NODE.life, [], entries(1, 2, 3))
    assert await metadata.renew(NODE, WAIT_S)
    await metadata.leave(NODE)
    for name in (RECORD, LIFE, BLOCKS, NODES):
        assert not await metadata._redis.exists(name)


@pytest.mark.parametrize("place", [RECORD, LIFE, BLOCKS, NODES])
async def test_a_foreign_value_in_the_place_of_a_key_is_replaced(metadata: StoreMetadata, place: str) -> None:
    raw = metadata._redis
    await known(metadata, 0)
    await raw.delete(place)
    await raw.zadd(place, {"nonsense": 1})
    assert await metadata.renew(NODE, WAIT_S) == (place in (NODES, RECORD)), "a renewal alone puts that right"
    await metadata.restart(NODE.life)
    assert await metadata.listed("kv-0") <= {key(0)}
    await metadata.change(NODE.life, [], entries(0, 1))
    assert await metadata.renew(NODE, WAIT_S)
    assert await copies(metadata, 0, 1) == [1, 1]


async def test_a_node_without_entries_renews_after_telling_all(metadata: StoreMetadata) -> None:
    await known(metadata, 0)
    await metadata.change(NODE.life, [key(0)], [])
    await metadata._redis.flushall()
    assert not await metadata.renew(NODE, WAIT_S)
    await metadata.restart(NODE.life)
    assert await metadata.renew(NODE, WAIT_S)


@pytest.mark.parametrize("size", [64 * 1024, 1 << 40])
async def test_an_entry_takes_few_bytes_of_redis(on_one: StoreMetadata, size: int) -> None:
    await on_one.register(NODE, WAIT_S)
    numbers = range(8192)
    await on_one.change(NODE.life, [], entries(*numbers, size=size))
    used = await on_one._redis.memory_usage(BLOCKS, samples=0)
    print(f"{used / len(numbers):.1f} bytes a block")
    assert used < 112 * len(numbers)


async def _lose_entries(raw: Redis) -> None:
    await raw.hdel(BLOCKS, *(await raw.hkeys(BLOCKS))[::2])


async def _lose_the_table(raw: Redis) -> None:
    await raw.delete(BLOCKS)


async def _lose_changes(raw: Redis) -> None:
    await raw.hdel(BLOCKS, *(await raw.hkeys(BLOCKS))[1:])
    await raw.hset(LIFE, "number", 1)


@pytest.mark.parametrize("lose", [_lose_entries, _lose_the_table, _lose_changes])
async def test_entries_lost_without_their_record_are_listed_again(
    on_one: StoreMetadata, redis_url: str, lose: Callable[[Redis], Awaitable[None]]
) -> None:
    numbers = range(12)
    async with running_node(redis_url, node_lease_s=6.0) as node, client_of(redis_url) as client:
        for number in numbers:
            await client.stored([number])
        await client.until_listed(numbers)
        await lose(on_one._redis)
        await eventually(lambda: node.figure("metadata_losses_total"), "the node has noticed")
        await client.until_listed(numbers)
        assert await on_one.listed("kv-0") == {key(number) for number in numbers}
        await eventually(lambda: node.figure("listed_blocks") == len(numbers), "the node knows that")


async def test_a_stale_entry_is_removed_with_what_was_lost(on_one: StoreMetadata, redis_url: str) -> None:
    """A server that lost the change by which a block was unlisted would name it forever."""
    async with running_node(redis_url, node_lease_s=6.0), client_of(redis_url) as client:
        await client.stored([1, 2])
        await client.until_listed([1, 2])
        raw = on_one._redis
        saved = {name: await raw.dump(name) for name in (LIFE, BLOCKS)}
        await client.remove([2])
        await client.until_listed([2], replicas=0)
        async with raw.pipeline(transaction=True) as at_once:  # the node may renew its record at any time
            for name, value in saved.items():
                at_once.restore(name, 0, value, replace=True)
            at_once.hexists(BLOCKS, key(2))
            assert (await at_once.execute())[-1] == 1
        await client.until_listed([2], replicas=0)
        await client.until_listed([1])
        assert await on_one.listed("kv-0") == {key(1)}


async def test_bad_urls_and_absent_servers_are_said_plainly() -> None:
    with pytest.raises(InvalidArgument) as caught:
        StoreMetadata("nonsense")
    assert caught.value.field == "redis_url"
    metadata = StoreMetadata("redis://127.0.0.1:9/0", timeout_s=0.2)
    with pytest.raises(Unavailable):
        await metadata.nodes()
    with pytest.raises(Unavailable):
        await metadata.change(NODE.life, [], entries(0))
    await metadata.close()


async def test_a_silent_server_costs_one_timeout_in_all() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()  # ends when the client gives up

    async with tcp_server(silent) as server:
        port = server.sockets[0].getsockname()[1]
        metadata = StoreMetadata(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
        for asked, question in enumerate((metadata.nodes, metadata.names, lambda: metadata.locate([key(0)])), 1):
            with pytest.raises(Unavailable):
                await question()
            # Connections are accepted in order: a second one of the question's would be there before ours.
            _, ours = await asyncio.open_connection("127.0.0.1", port)
            await eventually(lambda asked=asked: len(connections) >= 2 * asked, "ours is accepted")
            assert len(connections) == 2 * asked, "tried again when the time was up"
            ours.close()
            await ours.wait_closed()
        await metadata.close()


async def test_a_cancellation_always_comes_through(on_one: StoreMetadata) -> None:
    """redis-py alone loses a cancellation now and then, and the task that continues would never end."""
    blocks = entries(*range(4))

    async def forever() -> None:
        while True:
            await on_one.change(NODE.life, [], blocks)
            await on_one.change(NODE.life, [each for each, _ in blocks], [])

    for turns in range(400):
        task = asyncio.create_task(forever())
        for _ in range(turns % 40):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=WAIT_S)
        assert done, f"still running after it was cancelled in turn {turns}"


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="host:port"):
        KvStoreSettings(transfer_listen="nowhere")
    assert KvStoreSettings(conductor="").conductor == ""


async def test_redis_may_go_and_come_back_empty() -> None:
    server = find_redis()
    try:
        async with running_node(server.url, node_lease_s=3.0) as node, client_of(server.url) as client:
            assert [each.life for each in await client.store.nodes()] == [Life("kv-0", node.node.boot_id)]
            await client.stored([1, 2])
            await client.until_listed([1, 2])
            await end_redis(server)
            client.forget_nodes()
            with pytest.raises(Unavailable):
                await client.put([3])
            # a client that knows the node still reads from it
            assert await client.fetch(node.address, [1, 2]) == 2
            await eventually(lambda: node.figure("metadata_failures_total"), "the node has noticed")
            node.node.remove([key(2)])
            await asyncio.to_thread(server.start)
            await client.until_listed([1])  # at the node's next renewal
            await client.until_listed([2], replicas=0)
            assert not node.context.stopping.is_set()
            client.forget_nodes()  # Redis is asked again
            assert await client.get([1]) == [True]
    finally:
        await asyncio.to_thread(server.close)


async def test_a_killed_node_is_a_miss_and_its_next_life_starts_empty(
    redis_url: str, start_node: Callable[..., ServiceProcess]
) -> None:
    first, second = [await asyncio.to_thread(start_node, node_id=node_id) for node_id in ("kv-0", "kv-1")]
    numbers = range(32)
    async with client_of(redis_url) as client:
        for number in numbers:
            await client.stored([number])
        await client.until_listed(numbers)
        await asyncio.to_thread(first.kill)  # its lease of 60 s stays
        arrived = await client.get(numbers)
        assert 0 < sum(arrived) < len(numbers)
        lost = [number for number, whole in zip(numbers, arrived, strict=True) if not whole]
        assert all(await client.get([number for number in numbers if number not in lost]))
        again = await asyncio.to_thread(start_node)
        client.forget_nodes()
        assert await client.listed(lost) == [0] * len(lost)
        for number in lost:
            await client.stored([number])
        await client.until_listed(numbers)
        assert await client.get(numbers) == [True] * len(numbers)
        assert again.alive
        assert second.alive
