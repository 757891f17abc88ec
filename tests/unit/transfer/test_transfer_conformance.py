from __future__ import annotations

import ast
import asyncio
import functools
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pinyon.transfer
from pinyon.transfer import (
    Access,
    EngineClosed,
    InvalidTransfer,
    Opcode,
    Reason,
    TransferEngine,
    TransferHandle,
    TransferLimitReached,
    TransferRequest,
    TransferStatus,
)
from pinyon.transfer.types.limits import MAX_BATCH_REQUESTS
from tests.unit.transfer.conftest import GENEROUS_S, PATIENT

READ, WRITE = Opcode.READ, Opcode.WRITE


def test_every_export_exists() -> None:
    for name in pinyon.transfer.__all__:
        assert getattr(pinyon.transfer, name) is not None
    with pytest.raises(AttributeError):
        _ = pinyon.transfer.nothing
    stub = ast.parse(Path(pinyon.transfer.__file__).with_name("__init__.pyi").read_text())
    stubbed = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert stubbed == set(pinyon.transfer.__all__)


def test_values_load_no_sockets() -> None:
    """The pure rooms import values from here."""
    code = "import sys, pinyon.transfer; sys.exit('socket' in sys.modules or 'asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_write_then_read(make_pair) -> None:
    pair = make_pair()
    pair.near[:] = os.urandom(len(pair.near))
    assert all(one.ok for one in pair.engine.transfer([pair.request(WRITE, 100, 7, 5000)]))
    assert pair.far[7:5007] == pair.near[100:5100]
    assert not any(pair.far[:7])
    assert not any(pair.far[5007:])
    (result,) = pair.engine.transfer([pair.request(READ, 50_000, 7, 5000)])
    assert (result.status, result.transferred_bytes, result.reason) == (TransferStatus.COMPLETED, 5000, Reason.NONE)
    assert pair.near[50_000:55_000] == pair.far[7:5007]
    stats = pair.engine.stats()
    assert (stats.written_bytes, stats.read_bytes, stats.requests["completed"]) == (5000, 5000, 2)
    assert (stats.requests_now, sum(stats.latency_buckets)) == (0, 2)


@functools.cache
def _noise(size: int) -> bytes:
    return np.random.default_rng(1).bytes(size)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_large_transfer_in_many_frames(make_pair, opcode: Opcode, request: pytest.FixtureRequest) -> None:
    staged = "device" in request.node.name  # staged by a pool of 64 MiB, less than the data
    size = (70 << 20 if staged else 18 << 20) + 13
    pair = make_pair(size, PATIENT if staged else replace(PATIENT, max_frame_bytes=2 << 20, stripe_min_bytes=1 << 20))
    source, target = (pair.far, pair.near) if opcode is READ else (pair.near, pair.far)
    source[:] = _noise(size)
    (result,) = pair.engine.transfer([pair.request(opcode, 0, 0, size)])
    assert result.ok
    assert result.transferred_bytes == size
    assert source == target


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_thousands_of_small_requests(make_pair, opcode: Opcode) -> None:
    count, each = 5000, 64
    pair = make_pair(count * each)
    source, target = (pair.far, pair.near) if opcode is READ else (pair.near, pair.far)
    source[:] = os.urandom(len(source))
    places = random.Random(2).sample(range(count), count)
    requests = [
        pair.request(opcode, *((there, here) if opcode is READ else (here, there)), each)
        for here, there in ((a * each, b * each) for a, b in zip(range(count), places, strict=True))
    ]
    assert all(one.ok for one in pair.engine.transfer(requests))
    for index, place in enumerate(places):
        assert target[place * each :][:each] == source[index * each :][:each]


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_refusals_touch_nothing_and_spare_the_rest_of_the_batch(make_pair, opcode: Opcode) -> None:
    pair = make_pair()
    pair.near[:] = b"n" * len(pair.near)
    pair.far[:] = b"f" * len(pair.far)
    size = len(pair.far)
    closed = pair.server.register_local_memory(bytearray(1000), access=Access.NONE)
    gone = pair.server.register_local_memory(bytearray(1000))
    pair.server.unregister(gone)
    good = pair.request(opcode, 0, 0, 10)
    asked = [
        good,
        pair.request(opcode, 100, size - 5, 300_000),
        pair.request(opcode, 100, 1 << 62, 10),
        good._replace(local_offset=100, remote_region=bytes(16), length=200_000),
        good._replace(local_offset=100, remote_region=gone.key),
        good._replace(local_offset=100, remote_region=closed.key),
        good._replace(local_offset=20, remote_offset=20),
    ]
    for _ in range(2):  # the connection stays in step
        results = pair.engine.transfer(asked)
        assert [(one.status.value, one.reason) for one in results] == [
            ("completed", Reason.NONE),
            ("refused", Reason.OUT_OF_RANGE),
            ("refused", Reason.OUT_OF_RANGE),
            ("refused", Reason.UNKNOWN_REGION),
            ("refused", Reason.UNKNOWN_REGION),
            ("refused", Reason.ACCESS_DENIED),
            ("completed", Reason.NONE),
        ]
    touched, other = (pair.near, b"n") if opcode is READ else (pair.far, b"f")
    new = b"f" if opcode is READ else b"n"
    assert touched == new * 10 + other * 10 + new * 10 + other * (size - 30)
    if opcode is WRITE:
        readable = pair.server.register_local_memory(bytearray(10), access=Access.READ)
        (result,) = pair.engine.transfer([good._replace(remote_region=readable.key)])
        assert result.reason is Reason.ACCESS_DENIED


@pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.READ])
def test_requests_of_several_regions_at_either_end_go_together(make_pair, opcode: Opcode) -> None:
    """The requests are in one batch, some of them neighbours: each moves its own region's bytes."""
    pair = make_pair(4000)
    near = [(pair.local.key, pair.near), *((pair.engine.register_local_memory(each).key, each) for each in _more())]
    far = [(pair.remote.key, pair.far), *((pair.server.register_local_memory(each).key, each) for each in _more())]
    source = near if opcode is Opcode.WRITE else far
    for number, (_, memory) in enumerate(source):
        memory[:] = random.Random(number).randbytes(len(memory))
    segment = pair.server.descriptor()
    order = [(0, 0), (0, 0), (1, 0), (1, 1), (0, 1), (2, 2), (2, 2), (0, 2), (1, 2)]
    places = [(here, there, 100 * position) for position, (here, there) in enumerate(order)]
    requests = [
        TransferRequest(opcode, near[here][0], at, segment, far[there][0], at, 100) for here, there, at in places
    ]
    assert all(each.ok for each in pair.engine.transfer(requests))
    for here, there, at in places:
        assert near[here][1][at : at + 100] == far[there][1][at : at + 100]
        assert any(near[here][1][at : at + 100])


def _more() -> list[bytearray]:
    return [bytearray(4000), bytearray(4000)]


def test_senseless_requests_are_refused_before_anything_moves(make_pair) -> None:
    pair = make_pair(1000)
    good = pair.request(WRITE, 0, 0, 10)
    for bad, field in (
        (good._replace(length=0), "length"),
        (good._replace(length=-5), "length"),
        (good._replace(local_offset=-1), "local_offset"),
        (good._replace(local_offset=991), "local_offset"),
        (good._replace(remote_offset=-1), "remote_offset"),
        (good._replace(remote_offset=1 << 63), "remote_offset"),
        (good._replace(local=bytes(16)), "local"),
        (good._replace(local="a key"), "local"),
        (good._replace(remote_region=b"short"), "remote_region"),
        (good._replace(opcode=2), "opcode"),
        (good._replace(remote=None), "remote"),
    ):
        with pytest.raises(InvalidTransfer) as caught:
            pair.engine.transfer([good, bad])
        assert caught.value.field == f"requests[1].{field}"
    for empty in ([], [good] * (MAX_BATCH_REQUESTS + 1)):
        with pytest.raises(InvalidTransfer):
            pair.engine.transfer(empty)
    with pytest.raises(InvalidTransfer):
        pair.engine.transfer([good], timeout_s=0)
    for buffer in (b"read only", bytearray(), "text", np.zeros((4, 4))[:, 1]):
        with pytest.raises(InvalidTransfer):
            pair.engine.register_local_memory(buffer)
    assert pair.engine.stats().requests_now == 0


def test_limits_hold(make_pair) -> None:
    pair = make_pair(1000, replace(PATIENT, max_regions=3, max_inflight_requests=4))
    good = pair.request(WRITE, 0, 0, 10)
    with pytest.raises(TransferLimitReached):
        pair.engine.transfer([good] * 5)
    while len(pair.engine._memory.regions()) < 3:
        pair.engine.register_local_memory(bytearray(1))
    with pytest.raises(TransferLimitReached):
        pair.engine.register_local_memory(bytearray(1))


async def test_await_and_cancel(make_pair) -> None:
    pair = make_pair(16 << 20)
    pair.near[:] = os.urandom(len(pair.near))
    request = pair.request(WRITE, 0, 0, len(pair.near))
    results = await asyncio.gather(*(pair.engine.transfer_async([request]) for _ in range(4)))
    assert all(one.ok for (one,) in results)
    assert pair.far == pair.near
    task = asyncio.create_task(pair.engine.transfer_async([request]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = pair.engine.stats()
    assert stats.requests_now == 0
    assert (await pair.engine.transfer_async([request]))[0].ok  # the engine goes on


async def test_group_submitted_from_another_thread(make_pair) -> None:
    """The layer-by-layer push has an engine thread that submits, and a loop that awaits."""
    pair = make_pair(64 * 1000)
    pair.near[:] = os.urandom(len(pair.near))
    group = pair.engine.group()

    def compute() -> None:
        for layer in range(64):
            group.submit([pair.request(WRITE, layer * 1000, layer * 1000, 1000)])

    await asyncio.to_thread(compute)
    results = await group.wait_async()
    assert len(results) == 64
    assert all(one.ok for one in results)
    assert pair.far == pair.near
    assert await group.wait_async() == results


def test_done_callbacks_run_once_and_may_fail(make_pair) -> None:
    pair = make_pair()
    called: list[TransferHandle] = []
    ended = threading.Event()

    def fail(_: TransferHandle) -> None:
        raise RuntimeError("on purpose")

    handle = pair.engine.submit([pair.request(WRITE, 0, 0, 1000)])
    handle.add_done_callback(fail)
    handle.add_done_callback(called.append)
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(GENEROUS_S)
    assert handle.wait()[0].ok
    assert handle.done
    handle.add_done_callback(called.append)
    assert called == [handle, handle]


def test_unregistered_memory_is_out_of_reach(make_pair) -> None:
    pair = make_pair()
    request = pair.request(WRITE, 0, 0, 1000)
    assert pair.engine.transfer([request])[0].ok
    pair.server.unregister(pair.remote)
    pair.server.unregister(pair.remote)
    assert pair.engine.transfer([request])[0].reason is Reason.UNKNOWN_REGION
    assert pair.server.descriptor().region(pair.remote.key) is None
    pair.engine.unregister(pair.local)
    with pytest.raises(InvalidTransfer):
        pair.engine.transfer([request])


def test_unregister_during_transfers(make_pair) -> None:
    """The engine does not touch the memory after the return: bytes written to it afterwards stay."""
    pair = make_pair(32 << 20)
    pair.near[:] = b"n" * len(pair.near)
    handles = [pair.engine.submit([pair.request(WRITE, 0, 0, len(pair.near))]) for _ in range(8)]
    pair.server.unregister(pair.remote)
    pair.far[:] = bytes(len(pair.far))
    for handle in handles:
        for result in handle.wait():
            assert result.status in (TransferStatus.COMPLETED, TransferStatus.REFUSED)
    assert pair.far.count(0) == len(pair.far)


def test_engine_life(make_pair) -> None:
    pair = make_pair()
    request = pair.request(WRITE, 0, 0, 10)
    pair.engine.close()
    pair.engine.close()
    with pytest.raises(EngineClosed):
        pair.engine.transfer([request])
    with pytest.raises(EngineClosed):
        pair.engine.start()
    with pytest.raises(EngineClosed):
        pair.engine.descriptor()
    idle = TransferEngine()
    with pytest.raises(EngineClosed):
        idle.descriptor()
    idle.close()
    with pytest.raises(InvalidTransfer):
        TransferEngine("0.0.0.0")
    with pytest.raises(InvalidTransfer):
        TransferEngine(secret=b"")


def test_close_ends_what_is_in_flight(make_pair) -> None:
    pair = make_pair(64 << 20)
    handles = [pair.engine.submit([pair.request(READ, 0, 0, len(pair.near))]) for _ in range(10)]
    pair.engine.close()
    for handle in handles:
        assert handle.wait(GENEROUS_S)[0].status in (TransferStatus.COMPLETED, TransferStatus.CANCELLED)
    assert pair.engine.stats().requests_now == 0
