"""Tenants at a running store node: nothing is found across them, and none goes beyond its quota."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.block_keys import chain_block_keys, namespace, tokens_to_bytes
from pinyon.core.request import RequestClass
from pinyon.store.records import ENTRY_BYTES
from pinyon.store.writer import PutOutcome
from tests.integration.kvstore_parts import OBJECT, STORE, Client, Node, acquire, call, client_of, key, release
from tests.integration.kvstore_parts import running_node as running
from tests.waiting import WAIT_S, eventually

HALF = 8 * OBJECT
"""Half of a node's memory."""


async def put(client: Client, tenant: str, numbers: Sequence[int]) -> tuple[PutOutcome, ...]:
    whose = RequestClass("chat", tenant=tenant)
    return await client.store.put(client.fill(numbers), OBJECT, WAIT_S, request_class=whose)


def tenants(node: Node, name: str) -> dict[str, float]:
    """Returns a metric's values by tenant."""
    name = f"pinyon_kvstore_{name}"
    return {
        sample.labels["tenant"]: sample.value
        for family in node.context.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


async def test_one_tenant_finds_nothing_of_another(node: Node, client: Client) -> None:
    prompt = tokens_to_bytes(range(64))
    anna, ben = (chain_block_keys(namespace("model", "layout", each), prompt, 16) for each in ("anna", "ben"))
    assert len(anna) == 4
    assert not {*anna} & {*ben}
    places = [client.kv.pieces(slot) for slot in range(4)]
    assert await client.store.put(list(zip(anna, places, strict=True)), OBJECT, WAIT_S) == (PutOutcome.STORED,) * 4
    await eventually(lambda: client.store.leading(anna, OBJECT, WAIT_S), "anna's blocks are listed")
    assert not await client.store.leading(ben, OBJECT, WAIT_S)
    lease, *_ = await node.node.acquire(ben, 1.0, allow_gaps=True)
    assert not lease.lease_id


async def test_a_tenant_at_its_quota_loses_its_own_objects(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running(redis_url, tenant_quotas="anna=25%,*=50%") as node, client_of(redis_url) as client:
        assert await put(client, "ben", range(8)) == (PutOutcome.STORED,) * 8
        for number in range(100, 110):
            assert await put(client, "anna", [number]) == (PutOutcome.STORED,)
            assert tenants(node, "tenant_used_bytes")["anna"] <= HALF // 2
        assert node.node.table.exists([key(number) for number in range(8)]) == [True] * 8, "ben's stay"
        held = node.node.table.exists([key(number) for number in range(100, 110)])
        assert held == [False] * 6 + [True] * 4
        assert tenants(node, "tenant_quota_bytes") == {"anna": HALF // 2, "*": HALF}
        assert tenants(node, "tenant_used_bytes") == {"anna": HALF // 2, "*": HALF}
        assert tenants(node, "quota_evicted_objects_total") == {"anna": 6, "*": 0}
        lease = await acquire(node, *range(106, 110))
        assert await put(client, "anna", [200]) == (PutOutcome.NO_SPACE,)
        assert "has no room: tenant 'anna' may hold 262144 bytes here" in caplog.text
        request = kvstore_pb2.PutStartRequest(keys=key(201), object_bytes=OBJECT)
        request.request_class.CopyFrom(common_pb2.RequestClass(kind="chat", turn=1, tenant="anna"))
        assert "too few of its objects may go" in (await call(node.address, STORE, "PutStart", request)).no_space
        assert node.figure("over_quota_objects_total") == 2
        assert await release(node, lease)
        assert await put(client, "anna", [200]) == (PutOutcome.STORED,)
        await eventually(node.nothing_is_left, "leases and puts are over")


async def test_redis_lists_whose_an_object_is(redis_url: str, tmp_path: Path) -> None:
    async def whose() -> list[bytes]:
        entries = await client.store.metadata._redis.hgetall("pinyon:v2:{kv-0}:blocks")
        return sorted(entry[ENTRY_BYTES:] for entry in entries.values())

    async with client_of(redis_url) as client:
        async with running(redis_url, disk_dir=str(tmp_path), disk_mib=16) as node:
            assert await put(client, "anna", [1]) == await put(client, "", [2]) == (PutOutcome.STORED,)
            await client.until_listed([1, 2])
            assert await whose() == [b"", b"anna"]
            assert await release(node, await acquire(node, 1))
            await eventually(lambda: node.figure("disk_objects") == 2, "both are saved")
        async with running(redis_url, disk_dir=str(tmp_path), disk_mib=16):
            client.forget_nodes()
            await client.until_listed([1, 2])
            assert await whose() == [b"", b"anna"]


async def test_no_space_says_what_is_in_the_way(node: Node, client: Client) -> None:
    await client.stored(range(10))
    lease = await acquire(node, *range(10))
    request = kvstore_pb2.PutStartRequest(keys=b"".join(map(key, range(20, 27))), object_bytes=OBJECT)
    reply = await call(node.address, STORE, "PutStart", request)
    assert "655360 are leased or pinned (0 pinned), 393216 being put and 0 lost" in reply.no_space
    assert (node.figure("leased_bytes"), node.figure("reserved_bytes")) == (10 * OBJECT, 6 * OBJECT)
    await release(node, lease)
    await eventually(lambda: node.figure("leased_bytes") == 0, "the lease is over")


async def test_a_quota_in_bytes_is_shared_by_the_nodes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.publisher.CLEAN_PERIOD_S", 0.05)
    async with running(redis_url, tenant_quotas="anna=1") as first, client_of(redis_url) as client:
        assert await put(client, "anna", range(16)) == (PutOutcome.STORED,) * 16
        async with running(redis_url, "kv-1", pool_mib=3, tenant_quotas="anna=1") as second:
            await eventually(lambda: tenants(first, "tenant_used_bytes")["anna"] == 4 * OBJECT, "a quarter is left")
            await eventually(lambda: tenants(second, "tenant_quota_bytes")["anna"] == 12 * OBJECT, "its part")
            await eventually(lambda: first.figure("listed_blocks") == 4, "Redis knows what went")
            client.forget_nodes()
            for number in range(100, 140):
                await put(client, "anna", [number])
                held = [tenants(each, "tenant_used_bytes")["anna"] for each in (first, second)]
                assert sum(held) <= 1 << 20
        await eventually(lambda: tenants(first, "tenant_quota_bytes")["anna"] == 16 * OBJECT, "it is alone again")
