"""A single small request that a task awaits: it takes the short way without a thread, and never blocks the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import select
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pinyon.transfer import Access, Opcode, Reason, TransferEngine, TransferResult, TransferStatus
from pinyon.transfer.awaited import AwaitedTransfers
from pinyon.transfer.links.tls import TlsContexts
from pinyon.transfer.memory.table import SMALL_BYTES
from pinyon.transfer.small import Trip
from tests.tls_files import TestAuthority
from tests.unit.transfer.conftest import FAST, GENEROUS_S, PATIENT, Pair, cut_links, transfer_threads, went_short

READ, WRITE = Opcode.READ, Opcode.WRITE
BOTH = pytest.mark.parametrize("opcode", [READ, WRITE])
SIZE = 1 << 18
STALLED = replace(FAST, stall_s=0.2)


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    folder = TestAuthority(tmp_path_factory.mktemp("tls")).folder("worker")
    return folder / "tls.crt", folder / "tls.key", folder / "ca.crt"


@pytest.fixture
def make_pair(tls_files: tuple[Path, ...], started: Callable[..., TransferEngine]) -> Callable[..., Pair]:
    def make(kind: str, limits: Any = PATIENT) -> Pair:
        transport, _, tls = kind.partition("-")
        contexts = TlsContexts(*tls_files) if tls else None
        engines = [started(transports=(transport,), limits=limits, tls=contexts) for _ in range(2)]
        pair = Pair.of(*engines, bytearray(SIZE), bytearray(random.Random(1).randbytes(SIZE)))
        pair.warm()
        return pair

    return make


async def under_way(pair: Pair, opcode: Opcode) -> asyncio.Task[list[TransferResult]]:
    """Sends a request, and returns its task; the loop goes on although no peer answers."""
    task = asyncio.create_task(pair.engine.transfer_async([pair.request(opcode, 0, 0, 4096)]))
    await asyncio.sleep(0)
    assert pair.engine.stats().requests_now == 1
    return task


@pytest.mark.parametrize("kind", ["tcp", "tcp-tls", "shm"])
def test_a_link_that_a_task_has_used_waits_as_before(make_pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is uvloop, which leaves watched sockets non-blocking: a caller with blocking calls would stall."""
    uvloop = pytest.importorskip("uvloop")
    pair = make_pair(kind)
    answer, seen = AwaitedTransfers._answer, []

    async def watched(self: AwaitedTransfers, trip: Trip) -> Any:
        descriptor = trip.endpoint.link.stream.sock.fileno()
        seen.append((descriptor, os.get_blocking(descriptor)))
        return await answer(self, trip)

    monkeypatch.setattr(AwaitedTransfers, "_answer", watched)
    for opcode in (READ, WRITE):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(pair.engine.transfer_async([pair.request(opcode, 0, 0, 4096)]))[0].ok
    assert seen
    assert [(each, os.get_blocking(each)) for each, _ in seen] == seen
    assert pair.engine.transfer([pair.request(WRITE, 0, 0, SIZE)])[0].ok


@pytest.mark.parametrize("kind", ["tcp", "tcp-tls", "shm"])
async def test_it_moves_what_was_asked_for_the_short_way(make_pair, kind: str) -> None:
    pair = make_pair(kind)
    rng = random.Random(2)
    near, far = bytearray(pair.near), bytearray(pair.far)
    before, short = pair.engine.stats(), went_short(pair.engine)
    for number in range(100):
        length = (1, SMALL_BYTES)[number] if number < 2 else rng.randint(1, SMALL_BYTES)
        here, there = rng.randint(0, SIZE - length), rng.randint(0, SIZE - length)
        opcode = rng.choice((READ, WRITE))
        asked = [pair.request(opcode, here, there, length)]
        assert await pair.engine.transfer_async(asked) == [TransferResult(TransferStatus.COMPLETED, length)]
        if opcode is READ:
            near[here : here + length] = far[there : there + length]
        else:
            far[there : there + length] = near[here : here + length]
    assert (pair.near, pair.far) == (near, far)
    assert went_short(pair.engine) - short == 100
    assert "pinyon-transfer-out" not in transfer_threads()
    after = pair.engine.stats()
    assert after.requests["completed"] - before.requests["completed"] == 100
    assert after.requests_now == 0


async def test_what_is_large_or_not_alone_goes_another_way(make_pair) -> None:
    pair = make_pair("tcp")
    short = went_short(pair.engine)
    for asked in ([pair.request(READ, 0, 0, SMALL_BYTES + 1)], [pair.request(WRITE, 0, 0, 100)] * 2):
        assert all(one.ok for one in await pair.engine.transfer_async(asked))
    assert went_short(pair.engine) == short


async def test_tasks_side_by_side_lose_nothing(make_pair) -> None:
    pair = make_pair("tcp")
    share = SIZE // 16
    asked = [pair.request(READ, at, at, share) for at in range(0, SIZE, share)]
    results = await asyncio.gather(*(pair.engine.transfer_async([one]) for one in asked))
    assert all(one.ok for (one,) in results)
    assert pair.near == pair.far


@BOTH
@pytest.mark.parametrize("kind", ["tcp", "tcp-tls", "shm"])
async def test_refusals_are_the_peers_and_nothing_is_touched(make_pair, kind: str, opcode: Opcode) -> None:
    pair = make_pair(kind)
    grant = pair.server.grant(pair.remote, [(0, 100)], Access.WRITE if opcode is READ else Access.READ)
    near, far = bytes(pair.near), bytes(pair.far)
    asked = pair.request(opcode, 0, 0, 100)._replace(remote_region=grant.key)
    for _ in range(2):
        (result,) = await pair.engine.transfer_async([asked])
        assert result == TransferResult(TransferStatus.REFUSED, 0, Reason.ACCESS_DENIED)
    assert (pair.near, pair.far) == (near, far)
    assert pair.engine.stats().requests["refused"] == 2
    assert (await pair.engine.transfer_async([pair.request(opcode, 0, 0, 100)]))[0].ok


@BOTH
@pytest.mark.parametrize("kind", ["tcp", "tcp-tls"])
async def test_the_loop_goes_on_until_the_peer_answers(make_pair, kind: str, opcode: Opcode) -> None:
    pair = make_pair(kind)
    short = went_short(pair.engine)
    with pair.held():
        task = await under_way(pair, opcode)
        assert not task.done()
    assert (await asyncio.wait_for(task, GENEROUS_S))[0].ok
    assert went_short(pair.engine) == short + 1
    assert pair.near[:4096] == pair.far[:4096]


@BOTH
async def test_a_task_that_is_cancelled_ends_it_first(make_pair, opcode: Opcode) -> None:
    pair = make_pair("tcp")
    near = bytes(pair.near)
    with pair.held():
        task = await under_way(pair, opcode)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.engine.stats().requests_now == 0
        assert pair.engine.stats().requests["cancelled"] == 1
    assert pair.near == near
    assert (await pair.engine.transfer_async([pair.request(opcode, 0, 0, 64)]))[0].ok  # over a separate link


@BOTH
async def test_a_peer_that_does_not_answer_is_avoided(make_pair, opcode: Opcode) -> None:
    pair = make_pair("tcp", STALLED)
    with pair.held():
        (result,) = await pair.engine.transfer_async([pair.request(opcode, 0, 0, 4096)])
    assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.STALLED)
    (path,) = pair.engine.stats().paths
    assert path.failures == {"stalled": 1}


async def test_a_deadline_ends_it(make_pair) -> None:
    pair = make_pair("tcp")
    with pair.held():
        (result,) = await pair.engine.transfer_async([pair.request(READ, 0, 0, 4096)], timeout_s=0.1)
    assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.DEADLINE)


@BOTH
@pytest.mark.parametrize("kind", ["tcp", "tcp-tls", "shm"])
async def test_a_link_that_the_peer_closed_is_replaced_silently(make_pair, kind: str, opcode: Opcode) -> None:
    pair = make_pair(kind)
    await asyncio.to_thread(cut_links, pair.server._acceptor)
    assert (await pair.engine.transfer_async([pair.request(opcode, 0, 0, 10)]))[0].ok
    assert pair.near[:10] == pair.far[:10]
    after = pair.engine.stats()
    assert (after.requests["failed"], after.requests_now) == (0, 0)
    assert not any(one.failures for one in after.paths)


async def test_close_and_unregister_end_it(make_pair) -> None:
    pair = make_pair("tcp")
    near = bytes(pair.near)
    with pair.held():
        task = await under_way(pair, READ)
        pair.engine.unregister(pair.local)  # memory is no longer touched once the answer is here
    cancelled = [TransferResult(TransferStatus.CANCELLED, 0, Reason.SHUTDOWN)]
    assert await asyncio.wait_for(task, GENEROUS_S) == cancelled
    assert pair.near == near
    pair = make_pair("tcp")
    with pair.held():
        task = await under_way(pair, WRITE)
        await asyncio.to_thread(pair.engine.close)
        assert await asyncio.wait_for(task, GENEROUS_S) == cancelled


def test_what_a_closed_loop_leaves_behind_ends(make_pair) -> None:
    pair = make_pair("tcp")
    loop = asyncio.new_event_loop()
    with pair.held():
        task = loop.run_until_complete(under_way(pair, WRITE))
        loop.close()
        pair.engine._awaited.end_orphans(time.monotonic())
        stats = pair.engine.stats()
        assert stats.requests_now == 0
        assert stats.failures == {"cancelled": 1}
    task._log_destroy_pending = False  # the interpreter would rightly complain
    del task
    gc.collect()
    assert pair.engine.stats().failures == {"cancelled": 1}
    assert pair.engine.transfer([pair.request(WRITE, 0, 0, 4096)])[0].ok


async def test_a_loop_that_lives_keeps_what_is_under_way(make_pair) -> None:
    pair = make_pair("tcp")
    with pair.held():
        task = await under_way(pair, READ)
        pair.engine._awaited.end_orphans(time.monotonic())
        assert pair.engine.stats().requests_now == 1
    assert (await task)[0].ok


LOOPS = pytest.mark.parametrize("maker", ["asyncio", "uvloop"])


def new_loop(maker: str) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = pytest.importorskip(maker).new_event_loop()
    return loop


def drop_loop_in_mid_transfer(pair: Pair, maker: str) -> Callable[[], asyncio.AbstractEventLoop | None]:
    loop = new_loop(maker)
    loop.run_until_complete(under_way(pair, READ))._log_destroy_pending = False  # type: ignore[attr-defined]
    return weakref.ref(loop)


def past_the_deadline() -> float:
    return time.monotonic() + 100 * GENEROUS_S


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@LOOPS
def test_loops_dropped_in_mid_transfer_take_no_connection_along(make_pair, maker: str) -> None:
    pair = make_pair("tcp")
    near = bytes(pair.near)
    count = PATIENT.connections_per_peer + 1
    for _ in range(count):
        with pair.held():
            dropped = drop_loop_in_mid_transfer(pair, maker)
            gc.collect()
            if maker == "asyncio":  # other loops are less thorough, and then the deadline ends it
                assert dropped() is None
            pair.engine._awaited.end_orphans(time.monotonic() if maker == "asyncio" else past_the_deadline())
            assert pair.engine.stats().requests_now == 0
        assert pair.near == near
        assert pair.engine.transfer([pair.request(WRITE, 0, 0, 4096)])[0].ok
        assert pair.engine.transfer([pair.request(WRITE, 0, 0, 64)])[0].ok  # its link lies ready for the next loop
    assert sum(pair.engine.stats().failures.values()) == count


@LOOPS
@pytest.mark.parametrize(
    ("kind", "opcode", "answered"),
    [("tcp", READ, True), ("tcp", WRITE, False), ("tcp-tls", READ, True), ("shm", WRITE, False)],
)
def test_a_stalled_loop_does_not_keep_its_request_past_deadline(
    make_pair, kind: str, opcode: Opcode, maker: str, answered: bool
) -> None:
    pair, loop = make_pair(kind), new_loop(maker)
    near = bytes(pair.near)
    with pair.held():
        task = loop.run_until_complete(under_way(pair, opcode))
        (endpoint,) = pair.engine._peers.moving
        descriptor = endpoint.link.stream.sock.fileno()
        if not answered:
            pair.engine._awaited.end_orphans(past_the_deadline())
    if answered:  # the answer is there, and no task reads it
        assert select.select([descriptor], [], [], GENEROUS_S)[0]
        pair.engine._awaited.end_orphans(past_the_deadline())
    assert os.fstat(descriptor)  # the loop would take another file of this number for its own
    stats = pair.engine.stats()
    assert (stats.requests_now, stats.failures) == (0, {"deadline": 1})
    assert pair.engine.transfer([pair.request(WRITE, 0, 0, 64)])[0].ok
    assert loop.run_until_complete(task) == [TransferResult(TransferStatus.TIMEOUT, 0, Reason.DEADLINE)]
    assert endpoint.link.stream.sock.fileno() == -1
    assert pair.near == near
    assert pair.engine.stats().failures == {"deadline": 1}
    assert loop.run_until_complete(pair.engine.transfer_async([pair.request(READ, 0, 0, 64)]))[0].ok
    loop.close()


@LOOPS
def test_a_loop_that_goes_on_while_given_up_touches_nothing(make_pair, maker: str) -> None:
    pair, loop = make_pair("tcp"), new_loop(maker)
    near = bytes(pair.near)
    results: list[TransferResult] = []
    given_up: list[bool] = []

    class GoesOn(dict[Trip, Any]):
        """A table that lets the loop turn between the removal of a request and the end of its link."""

        def pop(self, trip: Trip, default: Any = None) -> Any:
            whose = super().pop(trip, default)
            if given_up and given_up.pop():
                results.extend(loop.run_until_complete(task))
            return whose

    pair.engine._awaited._under_way = GoesOn()
    with pair.held():
        task = loop.run_until_complete(under_way(pair, READ))
        (endpoint,) = pair.engine._peers.moving
    assert select.select([endpoint.link.stream.sock], [], [], GENEROUS_S)[0]
    given_up.append(True)
    pair.engine._awaited.end_orphans(past_the_deadline())
    assert results == [TransferResult(TransferStatus.TIMEOUT, 0, Reason.DEADLINE)]
    assert pair.near == near
    assert pair.engine.stats().failures == {"deadline": 1}
    loop.close()


@LOOPS
def test_a_task_cancelled_after_it_was_given_up_is_counted_once(make_pair, maker: str) -> None:
    pair, loop = make_pair("tcp"), new_loop(maker)
    with pair.held():
        task = loop.run_until_complete(under_way(pair, WRITE))
        (endpoint,) = pair.engine._peers.moving
        pair.engine._awaited.end_orphans(past_the_deadline())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    assert endpoint.link.stream.sock.fileno() == -1
    assert pair.engine.stats().failures == {"deadline": 1}
    loop.close()
