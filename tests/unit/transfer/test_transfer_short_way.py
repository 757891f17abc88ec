"""A single small request by the short way: correct moves, correct refusals, and a chain when anything goes wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pinyon.transfer import (
    Access,
    Network,
    Nic,
    Opcode,
    Reason,
    TransferEngine,
    TransferLimits,
    TransferRequest,
    TransferResult,
    TransferStatus,
)
from pinyon.transfer.memory.table import SMALL_BYTES
from tests.on_compiled import REPLACES_METHODS
from tests.unit.transfer.conftest import FAST, GENEROUS_S, PATIENT, Pair, cut_links, eventually, users, went_short

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 1 << 20
LIMITS = replace(PATIENT, stripe_min_bytes=SIZE // 2)
LOOPBACK = Nic("lo", "tcp", "127.0.0.1", 0)


MOST_BYTES = LIMITS.stripe_min_bytes
"""The largest request that takes the short way."""


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest, started: Callable[..., TransferEngine]) -> Pair:
    engines = [started(transports=(request.param,), limits=LIMITS) for _ in range(2)]
    pair = Pair.of(*engines, bytearray(SIZE), bytearray(SIZE))
    pair.warm()
    return pair


def test_it_moves_what_was_asked_for_and_says_so(pair: Pair) -> None:
    rng = random.Random(1)
    near, far = bytearray(rng.randbytes(SIZE)), bytearray(rng.randbytes(SIZE))
    pair.near[:], pair.far[:] = near, far
    before, moved = pair.engine.stats(), 0
    short = went_short(pair.engine)
    most = MOST_BYTES
    sizes = [1, 4096, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, most]
    for number in range(200):
        length = sizes[number] if number < len(sizes) else rng.randint(1, rng.choice((SMALL_BYTES, most)))
        here, there = rng.randint(0, SIZE - length), rng.randint(0, SIZE - length)
        opcode = rng.choice((READ, WRITE))
        assert pair.engine.transfer([pair.request(opcode, here, there, length)]) == [
            TransferResult(TransferStatus.COMPLETED, length)
        ]
        moved += length
        if opcode is READ:
            near[here : here + length] = far[there : there + length]
        else:
            far[there : there + length] = near[here : here + length]
    assert (pair.near, pair.far) == (near, far)
    after = pair.engine.stats()
    assert went_short(pair.engine) - short == 200
    assert after.read_bytes + after.written_bytes - before.read_bytes - before.written_bytes == moved
    assert after.requests["completed"] - before.requests["completed"] == 200
    assert sum(after.latency_buckets) == after.requests["completed"]
    (path,) = after.paths
    assert path.nbytes == after.read_bytes + after.written_bytes
    assert path.chains == sum(path.latency_buckets) == after.requests["completed"]


def test_what_is_not_small_or_not_alone_is_a_chain(pair: Pair) -> None:
    short = went_short(pair.engine)
    for requests in ([pair.request(READ, 0, 0, MOST_BYTES + 1)], [pair.request(WRITE, 0, 0, 100)] * 2):
        assert all(one.ok for one in pair.engine.transfer(requests))
    assert went_short(pair.engine) == short


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_refusals_are_the_peers_and_nothing_is_touched(pair: Pair, opcode: Opcode) -> None:
    grants = {
        "revoked": pair.server.grant(pair.remote, [(0, 100)], Access.READ_WRITE),
        "wrong way": pair.server.grant(pair.remote, [(0, 100)], Access.WRITE if opcode is READ else Access.READ),
        "short": pair.server.grant(pair.remote, [(0, 100)], Access.READ_WRITE),
    }

    def ask(name: str, length: int) -> TransferResult:
        asked = pair.request(opcode, 0, 0, length)._replace(remote_region=grants[name].key)
        return pair.engine.transfer([asked])[0]

    assert ask("revoked", 100).ok
    pair.server.revoke(grants["revoked"])
    pair.near[:200], pair.far[:200] = b"n" * 200, b"f" * 200
    for name, length, reason in (
        ("revoked", 100, Reason.UNKNOWN_REGION),
        ("wrong way", 100, Reason.ACCESS_DENIED),
        ("short", 101, Reason.OUT_OF_RANGE),
    ):
        for _ in range(2):
            assert ask(name, length) == TransferResult(TransferStatus.REFUSED, 0, reason)
    assert (pair.near[:200], pair.far[:200]) == (b"n" * 200, b"f" * 200)
    assert ask("short", 100).ok
    counted = pair.engine.stats().requests
    assert (counted["refused"], counted["failed"]) == (6, 0)


def test_callers_side_by_side_lose_nothing(pair: Pair) -> None:
    share = SIZE // 8
    pair.far[:] = random.Random(2).randbytes(SIZE)
    before = pair.engine.stats()
    failed: list[TransferResult] = []

    def work(number: int) -> None:
        for step in range(50):
            at = number * share + step * 1024
            failed.extend(one for one in pair.engine.transfer([pair.request(READ, at, at, 1024)]) if not one.ok)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(GENEROUS_S)
    assert not failed
    for number in range(8):
        part = slice(number * share, number * share + 50 * 1024)
        assert pair.near[part] == pair.far[part]
    after = pair.engine.stats()
    assert after.requests["completed"] - before.requests["completed"] == 400
    assert sum(one.chains for one in after.paths) == after.requests["completed"]
    assert after.requests_now == 0


# --- while one is under way ---


class Caller(threading.Thread):
    """A thread that waits in ``transfer`` with one small request."""

    def __init__(self, engine: TransferEngine, request: TransferRequest) -> None:
        super().__init__(daemon=True)
        self._engine, self._request = engine, request
        self.results: list[TransferResult] = []
        self.start()
        eventually(lambda: engine.stats().requests_now == 1, "the request is under way")

    def run(self) -> None:
        self.results = self._engine.transfer([self._request])

    def result(self) -> TransferResult:
        self.join(GENEROUS_S)
        (result,) = self.results
        return result


@pytest.fixture
def make_tcp(started: Callable[..., TransferEngine]) -> Callable[..., Pair]:
    def make(limits: TransferLimits = PATIENT, **arguments: Any) -> Pair:
        engines = [started(transports=("tcp",), limits=limits, **arguments) for _ in range(2)]
        pair = Pair.of(*engines, bytearray(SIZE), bytearray(b"f") * SIZE)
        pair.warm()
        pair.near[:] = bytes(SIZE)
        return pair

    return make


def test_nothing_lands_in_a_region_unregistered_meanwhile(make_tcp) -> None:
    pair = make_tcp()
    with pair.held():
        caller = Caller(pair.engine, pair.request(READ, 0, 0, 4096))
        unregister = threading.Thread(target=pair.engine.unregister, args=(pair.local,), daemon=True)
        unregister.start()
        unregister.join(GENEROUS_S)  # it does not wait: memory is untouched until the answer is here
        assert not unregister.is_alive()
    assert caller.result() == TransferResult(TransferStatus.CANCELLED, 0, Reason.SHUTDOWN)
    assert not any(pair.near)
    assert pair.engine.stats().requests_now == 0


def test_a_large_one_is_stopped_before_its_region_goes(make_tcp) -> None:
    pair = make_tcp()
    with pair.held():
        caller = Caller(pair.engine, pair.request(READ, 0, 0, 2 * SMALL_BYTES))
        eventually(lambda: users(pair.engine._memory, pair.local) == 1, "it holds its memory")
        pair.engine._memory.unregister(pair.local, 0.05)  # like the engine, with a short wait for the end
        pair.near += b"x"  # nothing holds the memory any more
    assert caller.result() == TransferResult(TransferStatus.CANCELLED, 0, Reason.SHUTDOWN)
    assert not any(pair.near[:-1])
    assert pair.engine.stats().requests_now == 0


@pytest.mark.parametrize("length", [4096, 2 * SMALL_BYTES])
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_close_ends_it(make_tcp, opcode: Opcode, length: int) -> None:
    pair = make_tcp()
    with pair.held():
        caller = Caller(pair.engine, pair.request(opcode, 0, 0, length))
        pair.engine.close()
        assert caller.result() == TransferResult(TransferStatus.CANCELLED, 0, Reason.SHUTDOWN)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_peer_that_does_not_answer_is_avoided(make_tcp, opcode: Opcode) -> None:
    pair = make_tcp(limits=FAST)
    with pair.held():
        (result,) = pair.engine.transfer([pair.request(opcode, 0, 0, 4096)])
    assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.STALLED)
    (path,) = pair.engine.stats().paths
    assert path.failures["stalled"] >= 1
    short = went_short(pair.engine)
    eventually(lambda: pair.engine.transfer([pair.request(opcode, 0, 0, 4096)])[0].ok, "the peer serves again")
    eventually(
        lambda: pair.engine.transfer([pair.request(opcode, 0, 0, 4096)])[0].ok and went_short(pair.engine) > short,
        "there is a short way again",
    )


def test_a_nic_that_goes_down_ends_it_at_once(make_tcp) -> None:
    pair = make_tcp(network=Network((LOOPBACK,)))
    (path,) = pair.engine.stats().paths
    assert path.path.local_nic == "lo"
    with pair.held():
        caller = Caller(pair.engine, pair.request(READ, 0, 0, 4096))
        pair.engine._peers.link_changed("lo", False)
        eventually(lambda: pair.engine.stats().paths[0].failures == {"connection_lost": 1}, "it was interrupted")
    assert caller.result().ok  # over a new connection: no other path is left, and the NIC is not really down


def test_a_deadline_ends_it(make_tcp) -> None:
    pair = make_tcp()
    with pair.held():
        (result,) = pair.engine.transfer([pair.request(READ, 0, 0, 4096)], timeout_s=0.3)
    assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.DEADLINE)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_an_idle_link_the_peer_closed_is_replaced_silently(pair: Pair, opcode: Opcode) -> None:
    retries = pair.engine.stats().retries
    cut_links(pair.server._acceptor)
    pair.near[:10] = b"n" * 10
    assert pair.engine.transfer([pair.request(opcode, 0, 0, 10)])[0].ok
    assert pair.engine.transfer([pair.request(WRITE, 0, 20, 10)])[0].ok
    assert pair.far[20:30] == pair.near[:10]
    after = pair.engine.stats()
    assert after.requests["failed"] == 0
    assert after.retries - retries <= 1
    assert not any(one.failures for one in after.paths)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_large_one_is_refused_as_a_small_one(make_tcp, opcode: Opcode) -> None:
    pair = make_tcp()
    wrong = Access.WRITE if opcode is READ else Access.READ
    grant = pair.server.grant(pair.remote, [(0, SIZE)], wrong)
    asked = pair.request(opcode, 0, 0, 2 * SMALL_BYTES)
    for _ in range(2):
        (result,) = pair.engine.transfer([asked._replace(remote_region=grant.key)])
        assert result == TransferResult(TransferStatus.REFUSED, 0, Reason.ACCESS_DENIED)
    assert not any(pair.near)
    assert pair.far[64:] == b"f" * (SIZE - 64)
    short = went_short(pair.engine)
    assert pair.engine.transfer([asked])[0].ok
    assert went_short(pair.engine) == short + 1


@REPLACES_METHODS
def test_bytes_that_were_changed_on_their_way_are_not_taken(make_tcp) -> None:
    pair = make_tcp()
    pair.far[:] = random.Random(3).randbytes(SIZE)
    ((endpoint,),) = pair.engine._peers.transports["tcp"]._free.values()

    class Flipping:
        """The stream of that endpoint, which corrupts an answer."""

        def __init__(self, stream) -> None:
            self._stream = stream

        def receive_some(self, buffer: memoryview, least: int, deadline: float) -> int:
            got = self._stream.receive_some(buffer, least, deadline)
            buffer[100] ^= 1
            return got

        def __getattr__(self, name: str):
            return getattr(self._stream, name)

    endpoint._stream = Flipping(endpoint._stream)
    (result,) = pair.engine.transfer([pair.request(READ, 0, 0, 4096)])
    assert result == TransferResult(TransferStatus.FAILED, 0, Reason.CHECKSUM)
    assert not any(pair.near)
    (path,) = pair.engine.stats().paths
    assert path.failures == {"checksum": 1}
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert pair.near[:4096] == pair.far[:4096]


def test_a_segment_with_news_of_its_addresses_is_listened_to(make_tcp) -> None:
    pair = make_tcp()
    news = replace(pair.segment, nics=(LOOPBACK._replace(port=pair.segment.port),))
    short = went_short(pair.engine)
    asked = pair.request(READ, 0, 0, 64)._replace(remote=news)
    assert pair.engine.transfer([asked])[0].ok
    assert went_short(pair.engine) == short
    assert {one.path.remote_nic for one in pair.engine.stats().paths} == {"", "lo"}
