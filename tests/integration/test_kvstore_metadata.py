"""The entries in Redis: shared with unrelated keys, lost and found again, and never trusted too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from launch.process import ServiceProcess
from launch.redis_server import RedisServer, find_redis
from pinyon.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from pinyon.store.metadata import BATCH, StoreMetadata
from pinyon.store.records import Life, NodeRecord
from services.kvstore.settings import KvStoreSettings
from tests.forks import forked
from tests.integration.kvstore_parts import WAIT_S, client_of, empty, end_redis, eventually, key, running_node
from tests.tcp_server import tcp_server

BOOT, OTHER = "a" * 32, "b" * 32
NODE = NodeRecord("kv-0", BOOT, "127.0.0.1:1", 1 << 20)
NEWER = NodeRecord("kv-0", OTHER, "127.0.0.1:2")
"""Another process that takes the name of ``NODE``."""


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = find_redis()
    yield server
    server.close()


@pytest.fixture
async def metadata(redis_server: RedisServer) -> AsyncIterator[StoreMetadata]:
    await empty(redis_server.url)
    metadata = StoreMetadata(redis_server.url, timeout_s=WAIT_S)
    yield metadata
    await metadata.close()


async def known(metadata: StoreMetadata, *numbers: int) -> None:
    """Registers ``NODE`` with these blocks."""
    await metadata.register(NODE, WAIT_S)
    await metadata.add(NODE.life, [(key(number), 5) for number in numbers])


async def test_replicas_of_live_nodes_are_found_in_batches(metadata: StoreMetadata) -> None:
    count = 2 * BATCH + 3
    keys = [key(number) for number in range(count)]
    other = NodeRecord("kv-1", OTHER, "127.0.0.1:2")
    await metadata.register(NODE, WAIT_S)
    await metadata.register(other, WAIT_S)
    await metadata.add(NODE.life, [(each, 100) for each in keys])
    await metadata.add(other.life, [(keys[0], 100), (keys[-1], 7)])
    located = await metadata.locate([*keys, key(-1 % 2**32)])
    assert [len(each) for each in located] == [2] + [1] * (count - 2) + [2, 0]
    assert [(replica.node.node_id, replica.size_bytes) for replica in located[count - 1]] == [
        ("kv-0", 100),
        ("kv-1", 7),
    ]
    await metadata.discard(NODE.life, keys)
    assert sum(map(len, await metadata.locate(keys))) == 2
    await metadata.leave(other)
    assert sum(map(len, await metadata.locate(keys))) == 0
    assert await metadata.nodes() == [NODE]


async def test_a_record_ends_with_its_lease_and_says_so(metadata: StoreMetadata) -> None:
    await metadata.register(NODE, 0.02)

    async def gone() -> bool:
        return not await metadata.nodes()

    await eventually(gone, "the record is gone")
    assert await metadata.renew(NODE, WAIT_S) is False
    assert await metadata.renew(NODE, WAIT_S) is True


async def test_a_name_has_one_life(metadata: StoreMetadata) -> None:
    await metadata.register(NODE, WAIT_S)
    await metadata.register(NEWER, WAIT_S)
    with pytest.raises(FailedPrecondition, match="kv-0"):
        await metadata.renew(NODE, WAIT_S)
    await metadata.leave(NODE)  # the record belongs to the newer life
    assert await metadata.nodes() == [NEWER]


async def test_purging_spares_the_living(metadata: StoreMetadata) -> None:
    keys = [key(number) for number in range(BATCH + 10)]
    await known(metadata, *range(len(keys)))
    await metadata.register(NEWER, WAIT_S)
    await metadata.add(NEWER.life, [(keys[0], 6)])
    assert await metadata.purge(NODE.life, BATCH) == BATCH
    assert NODE.life in await metadata.lives()
    assert await metadata.purge(NODE.life, BATCH) == 10
    assert await metadata.lives() == {NEWER.life}
    assert [replica.size_bytes for replicas in await metadata.locate(keys) for replica in replicas] == [6]
    assert len(await metadata._redis.keys()) == 5


async def test_foreign_values_are_ignored_and_counted(metadata: StoreMetadata) -> None:
    raw = metadata._redis
    await known(metadata, 0, 1, 2)
    block = f"pinyon:v1:block:{key(0).hex()}"
    await raw.hset(block, mapping={b"nonsense": b"1", b"kv-0/short": b"2", f"kv-9/{BOOT}": b"-3", b"\xff/\xfe": b"4"})
    await raw.set(f"pinyon:v1:block:{key(3).hex()}", "not a hash")
    await raw.sadd("pinyon:v1:lives", b"\xff\xfe", "kv-7", f"kv-8/{BOOT}", f"kv 9/{BOOT}")
    await raw.set("pinyon:v1:node:kv-8", "{not json")
    await raw.sadd(f"pinyon:v1:index:{NODE.life}", b"not a key")
    assert await metadata.nodes() == [NODE]
    assert metadata.malformed == 4  # three lives and a record
    located = await metadata.locate([key(number) for number in range(4)])
    assert [len(replicas) for replicas in located] == [1, 1, 1, 0]
    assert metadata.malformed == 4 + 4 + 5  # the nodes were asked for again; four fields and a string
    await metadata.add(NODE.life, [(key(3), 5), (key(4), 5)])  # a broken entry does not break the others
    assert [len(each) for each in await metadata.locate([key(4)], [NODE])] == [1]
    await metadata.leave(NODE)
    assert await metadata.purge(NODE.life, 1000) == 6
    assert await metadata.locate([key(0), key(4)], [NODE]) == [[], []]
    await raw.set(f"pinyon:v1:index:kv-8/{BOOT}", "not a set")
    assert await metadata.purge(Life("kv-8", BOOT), 1000) == 0


async def test_nobody_takes_a_name_back_that_another_process_has_taken(metadata: StoreMetadata) -> None:
    for turns in range(60):  # the newer life registers at many different points of the older one's renewal
        await metadata.register(NODE, WAIT_S)
        await metadata._redis.ping()
        renewal = asyncio.create_task(metadata.renew(NODE, WAIT_S))
        for _ in range(turns):
            await asyncio.sleep(0)
        await metadata.register(NEWER, WAIT_S)
        await asyncio.wait({renewal})
        assert await metadata.nodes() == [NEWER], f"after {turns} turns"
        assert renewal.exception() is None or isinstance(renewal.exception(), FailedPrecondition)


async def test_a_process_whose_name_was_taken_writes_nothing(metadata: StoreMetadata) -> None:
    await known(metadata, 0)
    await metadata.register(NEWER, WAIT_S)
    await metadata.purge(NODE.life, 1000)
    with pytest.raises(FailedPrecondition, match="kv-0"):
        await metadata.add(NODE.life, [(key(1), 5)])
    await metadata.leave(NODE)
    assert await metadata.lives() == {NEWER.life}
    assert await metadata.nodes() == [NEWER]
    assert await metadata.locate([key(0), key(1)], [NODE]) == [[], []]


async def test_a_life_that_is_back_is_not_purged(metadata: StoreMetadata) -> None:
    keys = [key(number) for number in range(BATCH + 10)]
    await known(metadata, *range(len(keys)))
    await metadata._redis.delete("pinyon:v1:node:kv-0")  # as when its lease has ended
    assert await metadata.purge(NODE.life, BATCH) == BATCH
    assert not await metadata.renew(NODE, WAIT_S), "its entries are not as it left them"
    assert await metadata.purge(NODE.life, BATCH) == 0
    assert await metadata.lives() == {NODE.life}
    assert sum(map(len, await metadata.locate(keys))) == 10
    await metadata.add(NODE.life, [(each, 5) for each in keys])
    assert await metadata.renew(NODE, WAIT_S)


async def test_a_change_that_comes_late_changes_nothing(metadata: StoreMetadata, redis_server: RedisServer) -> None:
    """A change that was sent and given up: a frozen server applies it later."""
    await known(metadata, 0)
    await metadata.discard(NODE.life, [key(0)])
    late = StoreMetadata(redis_server.url, timeout_s=WAIT_S)
    with pytest.raises(Unavailable, match="lost"):
        await late.add(NODE.life, [(key(0), 5)])
    await late.close()
    assert await metadata.locate([key(0)]) == [[]]
    assert await metadata.renew(NODE, WAIT_S)


async def test_a_redis_that_lost_the_last_changes_is_noticed_next_time(metadata: StoreMetadata) -> None:
    raw = metadata._redis
    await known(metadata, 0)
    saved = {name: await raw.dump(name) for name in await raw.keys()}
    await metadata.add(NODE.life, [(key(1), 5)])
    await metadata.discard(NODE.life, [key(0)])

    async def fail_over() -> None:
        await raw.flushall()  # including the scripts
        await raw.script_flush()
        for name, value in saved.items():
            await raw.restore(name, round(WAIT_S * 1000), value)

    await fail_over()
    assert not await metadata.renew(NODE, WAIT_S)
    assert await metadata.listed(NODE.life) == {key(0)}
    await metadata.discard(NODE.life, [key(0)])  # what the node does then: it lists everything again
    await metadata.add(NODE.life, [(key(1), 5)])
    assert await metadata.renew(NODE, WAIT_S)
    await fail_over()
    with pytest.raises(Unavailable, match="lost"):
        await metadata.add(NODE.life, [(key(2), 5)])
    await metadata.add(NODE.life, [(key(1), 5), (key(2), 5)])
    assert await metadata.renew(NODE, WAIT_S)


async def test_a_lost_index_is_noticed_at_the_next_change(metadata: StoreMetadata) -> None:
    """A busy node changes entries between any two renewals; it must not take a lost index for the one it left."""
    raw = metadata._redis
    await known(metadata, 0, 1, 2)
    await metadata.discard(NODE.life, [key(0)])
    await raw.delete(f"pinyon:v1:index:{NODE.life}")
    with pytest.raises(Unavailable, match="lost"):
        await metadata.add(NODE.life, [(key(3), 5)])
    await metadata.restart(NODE.life)  # what the node does then: it lists everything again
    await metadata.add(NODE.life, [(key(number), 5) for number in range(1, 4)])
    assert await metadata.renew(NODE, WAIT_S)
    await metadata.leave(NODE)
    assert await metadata.purge(NODE.life, 1000) == 3, "nothing is left behind that no index names"
    assert not await raw.keys("pinyon:v1:*")


@pytest.mark.parametrize("name", ["written:{life}", "node:{life.node_id}", "lives", "index:{life}"])
async def test_a_foreign_value_in_the_place_of_a_key_is_replaced(metadata: StoreMetadata, name: str) -> None:
    raw = metadata._redis
    await known(metadata, 0)
    place = "pinyon:v1:" + name.format(life=NODE.life)
    await raw.delete(place)
    await raw.zadd(place, {"nonsense": 1})
    assert await metadata.renew(NODE, WAIT_S) == (name == "lives"), "a renewal alone puts that right"
    await metadata.restart(NODE.life)
    assert await metadata.listed(NODE.life) <= {key(0)}
    await metadata.add(NODE.life, [(key(0), 5), (key(1), 5)])
    assert await metadata.renew(NODE, WAIT_S)
    assert [len(each) for each in await metadata.locate([key(0), key(1)])] == [1, 1]


async def test_a_node_without_entries_renews_after_telling_everything(metadata: StoreMetadata) -> None:
    await known(metadata, 0)
    await metadata.discard(NODE.life, [key(0)])
    await metadata._redis.flushall()
    assert not await metadata.renew(NODE, WAIT_S)
    await metadata.restart(NODE.life)
    assert await metadata.renew(NODE, WAIT_S)


async def _lose_entries(raw: Redis, life: Life) -> None:
    names = sorted(await raw.keys("pinyon:v1:block:*"))
    await raw.delete(*names[::2])


async def _lose_index(raw: Redis, life: Life) -> None:
    await raw.delete(f"pinyon:v1:index:{life}")


async def _lose_changes(raw: Redis, life: Life) -> None:
    for name in sorted(await raw.keys("pinyon:v1:block:*"))[1:]:
        await raw.delete(name)
        await raw.srem(f"pinyon:v1:index:{life}", bytes.fromhex(name.decode().rpartition(":")[2]))
    await raw.set(f"pinyon:v1:written:{life}", 1)


@pytest.mark.parametrize("lose", [_lose_entries, _lose_index, _lose_changes])
async def test_entries_lost_without_their_record_are_listed_again(
    metadata: StoreMetadata, redis_server: RedisServer, lose: Callable[[Redis, Life], Awaitable[None]]
) -> None:
    numbers = range(12)
    async with running_node(redis_server.url, node_lease_s=6.0) as node, client_of(redis_server.url) as client:
        for number in numbers:
            await client.stored([number])
        await client.until_listed(numbers)
        life = Life("kv-0", node.node.boot_id)
        await lose(metadata._redis, life)
        await eventually(lambda: node.figure("metadata_losses_total"), "the node has noticed")
        await client.until_listed(numbers)

        async def indexed() -> bool:
            return await metadata.listed(life) == {key(number) for number in numbers}

        await eventually(indexed, "the index is whole")
        await eventually(lambda: node.figure("listed_blocks") == len(numbers), "the node knows that")


async def test_a_stale_entry_is_removed_with_what_was_lost(metadata: StoreMetadata, redis_server: RedisServer) -> None:
    """A server that lost the change by which a block was unlisted would name it forever."""
    async with running_node(redis_server.url, node_lease_s=6.0) as node, client_of(redis_server.url) as client:
        await client.stored([1, 2])
        await client.until_listed([1, 2])
        raw, life = metadata._redis, Life("kv-0", node.node.boot_id)
        saved = {name: await raw.dump(name) for name in await raw.keys(b"*[0-9a-f]") if b"node:" not in name}
        await client.remove([2])
        await client.until_listed([2], replicas=0)
        async with raw.pipeline(transaction=True) as at_once:  # the node may renew its record at any time
            for name, value in saved.items():
                at_once.restore(name, 0, value, replace=True)
            at_once.exists(f"pinyon:v1:block:{key(2).hex()}")
            assert (await at_once.execute())[-1] == 1
        await client.until_listed([2], replicas=0)
        await client.until_listed([1])
        assert await metadata.listed(life) == {key(1)}


async def test_bad_urls_and_absent_servers_are_said_plainly() -> None:
    with pytest.raises(InvalidArgument) as caught:
        StoreMetadata("nonsense")
    assert caught.value.field == "redis_url"
    metadata = StoreMetadata("redis://127.0.0.1:9/0", timeout_s=0.2)
    with pytest.raises(Unavailable):
        await metadata.nodes()
    with pytest.raises(Unavailable):
        await metadata.add(NODE.life, [(key(0), 5)])
    await metadata.close()


async def test_a_silent_server_costs_one_timeout_in_all() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()  # ends when the client gives up

    async with tcp_server(silent) as server:
        port = server.sockets[0].getsockname()[1]
        metadata = StoreMetadata(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
        for asked, question in enumerate((metadata.nodes, metadata.lives, lambda: metadata.locate([key(0)])), 1):
            with pytest.raises(Unavailable):
                await question()
            # Connections are accepted in order: a second one of the question's would be there before ours.
            _, ours = await asyncio.open_connection("127.0.0.1", port)
            await eventually(lambda asked=asked: len(connections) >= 2 * asked, "ours is accepted")
            assert len(connections) == 2 * asked, "tried again when the time was up"
            ours.close()
            await ours.wait_closed()
        await metadata.close()


async def test_a_cancellation_always_comes_through(metadata: StoreMetadata) -> None:
    """redis-py alone loses a cancellation now and then, and the task that continues would never end."""
    blocks = [(key(number), 5) for number in range(4)]

    async def forever() -> None:
        while True:
            await metadata.add(NODE.life, blocks)
            await metadata.discard(NODE.life, [each for each, _ in blocks])

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


@pytest.fixture
def spawn(redis_server: RedisServer, tmp_path: Path) -> Iterator[Callable[[str], ServiceProcess]]:
    processes: list[ServiceProcess] = []

    def start(node_id: str) -> ServiceProcess:
        arguments = ["--instance-id", node_id, "--redis-url", redis_server.url, "--pool-mib", "4"]
        arguments += ["--metrics-listen", "", "--node-lease-s", "60"]
        process = ServiceProcess(node_id, "services.kvstore", arguments, tmp_path / node_id, forked)
        processes.append(process)
        process.spawn()
        process.wait_ready(time.monotonic() + 60)
        return process

    yield start
    for process in processes:
        process.kill()


async def test_a_killed_node_is_a_miss_and_its_next_life_starts_empty(
    redis_server: RedisServer, metadata: StoreMetadata, spawn: Callable[[str], ServiceProcess]
) -> None:
    first, second = [await asyncio.to_thread(spawn, node_id) for node_id in ("kv-0", "kv-1")]
    numbers = range(32)
    async with client_of(redis_server.url) as client:
        for number in numbers:
            await client.stored([number])
        await client.until_listed(numbers)
        await asyncio.to_thread(first.kill)  # its lease of 60 s stays
        arrived = await client.get(numbers)
        assert 0 < sum(arrived) < len(numbers)
        lost = [number for number, whole in zip(numbers, arrived, strict=True) if not whole]
        assert all(await client.get([number for number in numbers if number not in lost]))
        again = await asyncio.to_thread(spawn, "kv-0")
        client.forget_nodes()
        assert await client.listed(lost) == [0] * len(lost)
        for number in lost:
            await client.stored([number])
        await client.until_listed(numbers)
        assert await client.get(numbers) == [True] * len(numbers)
        assert again.alive
        assert second.alive
