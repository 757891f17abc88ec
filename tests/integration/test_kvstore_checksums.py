"""Objects whose bytes change in the store or on their way are misses, and the bad copy goes."""

from __future__ import annotations

from typing import Any

import pytest

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.store.kv_memory import KvMemory
from pinyon.store.reader import PartRange
from pinyon.store.writer import PutOutcome
from pinyon.transfer import Opcode, TransferEngine, TransferRequest, TransferResult
from tests.integration.kvstore_parts import (
    OBJECT,
    READ,
    STORE,
    Client,
    Node,
    acquire,
    call,
    content,
    end,
    key,
    release,
    settled,
    start,
)
from tests.waiting import WAIT_S, eventually


def flip(node: Node, number: int, at: int = 0) -> None:
    """Changes one bit of an object in the node's memory."""
    table = node.node.table
    offset = table._readable[key(number)].offset
    node.node._memory.view[offset + at] ^= 1


async def test_a_get_goes_on_behind_an_object_that_changed(node: Node, client: Client) -> None:
    numbers = [1, 2, 3, 4]
    await client.stored(numbers)
    await client.until_listed(numbers)
    flip(node, 2)
    objects = [(key(number), client.kv.pieces(slot)) for slot, number in enumerate(numbers)]
    assert await client.store.get(objects, OBJECT, WAIT_S) == [True, False, True, True]
    assert await client.store.get(objects, OBJECT, WAIT_S) == [True, False, True, True], "the node is not avoided"


async def test_an_object_that_changed_in_memory_is_dropped(node: Node, client: Client) -> None:
    await client.stored([1, 2, 3])
    await client.until_listed([1, 2, 3])
    flip(node, 2, at=OBJECT - 1)
    assert await client.fetch(node.address, [1, 2, 3]) == 1
    assert client.reader.corrupt == 1
    await eventually(lambda: node.figure("corrupt_objects_total") == 1, "the node has looked at its copy")
    await client.until_listed([2], replicas=0)
    await eventually(node.nothing_is_left, "the lease is over")
    client.forget_nodes()
    assert await client.put([1, 2, 3]) == (PutOutcome.EXISTS, PutOutcome.STORED, PutOutcome.EXISTS)
    assert await client.fetch(node.address, [1, 2, 3]) == 3
    assert node.figure("corrupt_objects_total") == 1


async def test_bytes_that_change_on_their_way_do_not_cost_the_copy(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.stored([1, 2])
    moved = TransferEngine.transfer_async

    async def noisy(
        engine: TransferEngine, requests: list[TransferRequest], timeout_s: float | None = None, **how: bool
    ) -> list[TransferResult]:
        results = await moved(engine, requests, timeout_s, **how)
        if requests[0].opcode is Opcode.READ:
            client.memory[OBJECT + 5] ^= 1
        return results

    monkeypatch.setattr(TransferEngine, "transfer_async", noisy)
    assert await client.fetch(node.address, [1, 2]) == 1
    await eventually(node.nothing_is_left, "the node has looked at its copy")
    assert node.figure("corrupt_objects_total") == 0
    monkeypatch.undo()
    assert await client.fetch(node.address, [1, 2]) == 2


async def test_a_source_that_changes_while_it_is_read_is_found(node: Node, client: Client) -> None:
    """The checksum is the writer's, of what it meant to put."""
    objects = client.fill([1])
    moved = client.engine.transfer_async

    async def late(
        requests: list[TransferRequest], timeout_s: float | None = None, **how: bool
    ) -> list[TransferResult]:
        client.memory[9] ^= 1
        return await moved(requests, timeout_s, **how)

    client.engine.transfer_async = late  # type: ignore[method-assign]
    assert await client.store.put(objects, OBJECT, WAIT_S) == (PutOutcome.STORED,)
    client.engine.transfer_async = moved  # type: ignore[method-assign]
    assert await client.fetch(node.address, [1]) == 0
    await eventually(lambda: node.figure("corrupt_objects_total") == 1, "the copy is dropped")


async def test_the_node_makes_checksums_that_a_writer_does_not_give(node: Node, client: Client) -> None:
    put = await start(node, 1, 2)
    client.memory[:OBJECT] = content(1)
    for slot in put.slots:
        assert (await client.move(Opcode.WRITE, put, slot.offset_bytes)).ok
    await end(node, put, commit=True)
    lease = await acquire(node, 1, 2)
    assert [len(block.checksums) for block in lease.blocks] == [8, 8]
    assert lease.blocks[0].checksums == lease.blocks[1].checksums
    await release(node, lease)
    flip(node, 1)
    assert await client.fetch(node.address, [1]) == 0


@pytest.mark.parametrize(("sums", "parts"), [(bytes(8), 1), (bytes(17), 1), (bytes(16 * 7), 7), (bytes(16), 4096)])
async def test_checksums_that_do_not_fit_are_refused(node: Node, sums: bytes, parts: int) -> None:
    put = await start(node, 1, 2)
    request = kvstore_pb2.PutEndRequest(put_id=put.put_id, commit=True, checksums=sums, parts=parts)
    with pytest.raises(InvalidArgument):
        await call(node.address, STORE, "PutEnd", request)
    assert node.figure("open_puts") == 1, "the writer may still end it"
    await end(node, put)
    assert node.nothing_is_left()


async def test_layers_of_objects_are_read_alone(node: Node, client: Client) -> None:
    layers = 4
    layer = OBJECT // layers
    result = await client.store.put(client.fill([1, 2]), OBJECT, WAIT_S, parts=layers)
    assert result == (PutOutcome.STORED,) * 2
    two = KvMemory.whole(client.region, 2 * layer)

    async def read(first: int) -> int:
        places = [two.pieces(slot) for slot in range(2)]
        terms = PartRange(first, 2, layers)
        found = await client.reader.read(node.address, [key(1), key(2)], places, 2 * layer, WAIT_S, parts=terms)
        await settled(client.reader)
        return found.leading

    for first in range(3):
        client.memory[: 4 * layer] = bytes(4 * layer)
        assert await read(first) == 2
        for slot, number in enumerate((1, 2)):
            expected = content(number)[first * layer : (first + 2) * layer]
            assert client.memory[slot * 2 * layer : (slot + 1) * 2 * layer] == expected
    flip(node, 2, at=3 * layer)
    assert [await read(first) for first in range(2)] == [2, 2]
    assert await read(2) == 1
    await eventually(lambda: node.figure("corrupt_objects_total") == 1, "the copy is dropped")


async def test_a_complaint_without_reason_changes_nothing(node: Node, client: Client) -> None:
    await client.stored([1, 2])
    lease = await acquire(node, 1, 2)
    request = kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id, corrupt=[0, 0, 1, 99, 4_000_000_000])
    assert (await call(node.address, READ, "Release", request)).released
    await eventually(node.nothing_is_left, "the lease is over")
    assert node.figure("objects") == 2
    assert not (await call(node.address, READ, "Release", request)).released


async def test_a_lease_is_renewed_until_it_is_released(node: Node, client: Client) -> None:
    await client.stored([1])
    lease = await acquire(node, 1, lease_ms=60_000)
    request = kvstore_pb2.RenewRequest(lease_id=lease.lease_id, lease_ms=1)
    assert (await call(node.address, READ, "Renew", request)).lease_ms == 1
    await eventually(lambda: node.figure("expired_leases_total") == 1, "a lease ends at the time named last")
    assert (await call(node.address, READ, "Renew", request)).lease_ms == 0
    lease = await acquire(node, 1, lease_ms=2_000)
    request = kvstore_pb2.RenewRequest(lease_id=lease.lease_id, lease_ms=3_600_000)
    assert (await call(node.address, READ, "Renew", request)).lease_ms == 60_000, "no longer than the node allows"
    (grant,) = node.node.readers._grants.values()
    assert grant.expires_s - node.node._clock() > 10.0
    assert await release(node, lease)
    assert (await call(node.address, READ, "Renew", request)).lease_ms == 0


async def test_objects_go_without_checksums_of_frames(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    moved = TransferEngine.transfer_async

    async def watched(
        engine: TransferEngine, requests: list[TransferRequest], timeout_s: float | None = None, **how: bool
    ) -> list[TransferResult]:
        asked.append(how["checksum"])
        return await moved(engine, requests, timeout_s, **how)

    monkeypatch.setattr(TransferEngine, "transfer_async", watched)
    await client.stored([1, 2])
    assert await client.fetch(node.address, [1, 2]) == 2
    assert asked == [False, False]
    monkeypatch.setattr(client.engine, "view", lambda key: None)  # as with memory of a GPU
    await client.stored([3])
    assert await client.fetch(node.address, [3]) == 1
    assert asked[2:] == [True, True]


async def test_a_put_without_checksums_ends_before_it_fails(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: object) -> list[bytes | None]:
        raise MemoryError

    monkeypatch.setattr("pinyon.store.writer.all_checksums", failing)
    with pytest.raises(ExceptionGroup, match="TaskGroup"):
        await client.store.put(client.fill([1]), OBJECT, WAIT_S)
    await eventually(node.nothing_is_left, "the put is given up")
    monkeypatch.undo()
    await client.stored([1])
    assert await client.fetch(node.address, [1]) == 1


@pytest.mark.parametrize("wrong", [{"parts": 0}, {"parts": 7}, {"parts": 4096}, {"runs": []}, {"places": [0, 1]}])
async def test_puts_that_make_no_sense_are_refused(client: Client, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"equal parts|per object"):
        await client.store.put(client.fill([1]), OBJECT, WAIT_S, **wrong)
