"""A store whose metadata is on several Redis servers, of which one dies: the nodes list everything again."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from redis.crc import key_slot

from pinyon.core.errors import PinyonError
from tests.integration.kvstore_parts import client_of, running_node
from tests.long import usually
from tests.redis_groups import ClusterOfThree, RedisGroup, WatchedMaster
from tests.waiting import eventually

TIMEOUT_S = 2.0
long = pytest.mark.skipif(not usually(0, long=1), reason="takes 20 s (./dev test --long)")


async def works(group: RedisGroup, victim: int) -> None:
    """Checks that blocks put before and after the death of a server are listed and read."""
    async with (
        running_node(group.url, node_lease_s=3.0) as node,
        client_of(group.url, redis_timeout_s=TIMEOUT_S) as client,
    ):
        await client.stored(range(8))
        await client.until_listed(range(8))
        await asyncio.to_thread(group.kill, victim)
        after = list(range(8, 16))

        async def stored() -> bool:
            with contextlib.suppress(PinyonError):
                client.forget_nodes()
                await client.put(after)
                return await client.listed(range(16)) == [1] * 16
            return False

        await eventually(stored, "puts and look-ups work again, and nothing is lost")
        assert await client.get(range(16)) == [True] * 16
        assert not node.context.stopping.is_set()


@long
async def test_the_store_survives_the_death_of_a_clusters_master() -> None:
    with await asyncio.to_thread(ClusterOfThree, replicas=True) as group:
        share = -(-16384 // 3)
        victim = group.masters[key_slot(b"kv-0") // share]
        await works(group, victim)


@long
async def test_the_store_survives_the_death_of_a_watched_master() -> None:
    with await asyncio.to_thread(WatchedMaster) as group:
        await works(group, group.master)


async def test_the_store_works_on_a_redis_cluster() -> None:
    with await asyncio.to_thread(ClusterOfThree) as group:
        async with (
            running_node(group.url) as first,
            running_node(group.url, "kv-1") as second,
            client_of(group.url) as client,
        ):
            for number in range(24):
                await client.stored([number])
            await client.until_listed(range(24))
            assert first.figure("put_objects_total")
            assert second.figure("put_objects_total")
            assert await client.get(range(24)) == [True] * 24
