"""The RDMA transport between two processes over soft-RoCE: transfers, refusals, and failures."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import pytest
import xxhash

from pinyon.transfer import Access, Network, Opcode, Reason, TransferEngine, TransferRequest, TransferStatus
from pinyon.transfer.chains.chain import ChainOutcome
from pinyon.transfer.links import acceptor
from pinyon.transfer.transports.rdma import server as rdma_server
from pinyon.transfer.transports.rdma.endpoint import RdmaEndpoint
from pinyon.transfer.transports.rdma.hca import Hca
from pinyon.transfer.transports.rdma.queue_pair import QueuePair
from pinyon.transfer.types.nic import Path
from tests.rdma.inside.nics import nic
from tests.rdma.inside.rdma_hosts import (
    GENEROUS_S,
    LIMITS,
    RAIL_0,
    RAIL_1,
    SECRET,
    HostA,
    HostB,
    Running,
    open_files,
    resources,
)
from tests.rdma.inside.rdma_nics import rdma_nic
from tests.waiting import wait_until

SIZE = 4 << 20
LONG = 32 << 20
"""Bytes whose transfer takes soft-RoCE on an emulated processor seconds."""
COMPLETED = (TransferStatus.COMPLETED, Reason.NONE, None)


@pytest.fixture(scope="module")
def host_b() -> Iterator[HostB]:
    host = HostB(SIZE)
    yield host
    host.close()


@pytest.fixture
def host_a() -> Iterator[HostA]:
    before = resources(), open_files()
    host = HostA()
    yield host
    host.close()
    wait_until(lambda: resources() == before[0] and open_files() <= before[1], "everything is freed")


def pattern(size: int, seed: int) -> bytearray:
    """Returns a pattern that repeats, but not within a piece of any transfer; random bytes would take too long here."""
    period = min(size, SIZE + 13)
    return (bytearray(random.Random(seed).randbytes(period)) * (size // period + 1))[:size]


def digest(buffer: bytearray) -> str:
    return xxhash.xxh3_128_hexdigest(buffer)


@pytest.mark.parametrize("path", [RAIL_0, RAIL_1], ids=["mtu-4096", "mtu-1024"])
def test_what_was_written_is_read_back(host_a: HostA, host_b: HostB, path: Path) -> None:
    sent, received = pattern(SIZE, 1), bytearray(SIZE)
    source, target = host_a.register(sent), host_a.register(received)
    key = host_b.keys[0]
    for offset, length in ((0, 1), (1, 4096), (4097, 70_001), (74_098, SIZE - 74_098)):
        where = (offset, key, offset, length)
        assert host_a.run(host_b.segment, Opcode.WRITE, [(source.key, *where)], path) == COMPLETED
        assert host_a.run(host_b.segment, Opcode.READ, [(target.key, *where)], path) == COMPLETED
    assert received == sent
    assert host_b.ask("digest", 0) == digest(sent)
    assert host_a.transport.endpoints == 1


def test_batches_of_hundreds_of_scattered_requests(host_a: HostA, host_b: HostB) -> None:
    rng = random.Random(2)
    near, model = pattern(SIZE, 3), bytearray(SIZE)
    local = host_a.register(near)
    key = host_b.keys[0]
    assert host_a.run(host_b.segment, Opcode.WRITE, [(host_a.register(model).key, 0, key, 0, SIZE)]) == COMPLETED
    # Blocks of 4 KiB, in a different order at each end; some are neighbours at both.
    here, there = rng.sample(range(SIZE // 4096), 700), rng.sample(range(SIZE // 4096), 700)
    there[100:200], here[100:200] = sorted(there[100:200]), sorted(here[100:200])
    moves = [(local.key, 4096 * a, key, 4096 * b, rng.randrange(1, 4097)) for a, b in zip(here, there, strict=True)]
    assert host_a.run(host_b.segment, Opcode.WRITE, moves) == COMPLETED
    for _, a, _, b, length in moves:
        model[b : b + length] = near[a : a + length]
    assert host_b.ask("digest", 0) == digest(model)
    back = bytearray(SIZE)
    target = host_a.register(back)
    moves = [(target.key, b, key, b, length) for _, _, _, b, length in moves]
    assert host_a.run(host_b.segment, Opcode.READ, moves) == COMPLETED
    for _, b, _, _, length in moves:
        assert back[b : b + length] == model[b : b + length]


def test_what_is_not_allowed_is_refused_and_the_rest_done(host_a: HostA, host_b: HostB) -> None:
    local = host_a.register(pattern(4096, 4))
    open_key, read_only, closed = host_b.keys
    moves = [
        (local.key, 0, open_key, 0, 100),
        (local.key, 0, bytes(16), 0, 100),
        (local.key, 0, open_key, SIZE - 99, 100),
        (local.key, 0, open_key, 1 << 62, 100),
        (local.key, 0, read_only, 0, 100),
        (local.key, 0, closed, 0, 100),
        (local.key, 0, open_key, SIZE - 100, 100),
    ]
    unknown, outside, denied = Reason.UNKNOWN_REGION, Reason.OUT_OF_RANGE, Reason.ACCESS_DENIED
    before = [host_b.ask("digest", number) for number in (1, 2)]
    written = host_a.run(host_b.segment, Opcode.WRITE, moves)
    assert written == (TransferStatus.COMPLETED, Reason.NONE, bytes([0, unknown, outside, outside, denied, denied, 0]))
    read = host_a.run(host_b.segment, Opcode.READ, moves)
    assert read == (TransferStatus.COMPLETED, Reason.NONE, bytes([0, unknown, outside, outside, 0, denied, 0]))
    assert [host_b.ask("digest", number) for number in (1, 2)] == before
    assert host_a.transport.endpoints == 1  # a refusal breaks no endpoint


def test_the_nic_refuses_what_the_peer_did_not_grant(host_a: HostA, host_b: HostB) -> None:
    """An initiator with a forged copy of the grant is refused by the peer's NIC."""
    local = host_a.register(pattern(4096, 5))
    read_only = host_b.keys[1]
    move = (local.key, 0, read_only, 0, 4096)
    assert host_a.run(host_b.segment, Opcode.READ, [move]) == COMPLETED
    before = host_b.ask("digest", 1)
    endpoint = host_a.transport.lease(host_a.chain(host_b.segment, Opcode.READ, [move]), RAIL_0)
    assert isinstance(endpoint, RdmaEndpoint)
    endpoint._keys.opened[read_only] = endpoint._keys.opened[read_only]._replace(access=Access.READ_WRITE)
    (_, address), *_ = endpoint._keys.opened[read_only].keys
    endpoint._keys.opened[host_b.keys[0]] = endpoint._keys.opened[read_only]._replace(keys=((0x7FFF_FF00, address),))
    host_a.transport.release(endpoint)
    # The queue pair breaks; a fresh one gets the true grant.
    refused = host_a.run(host_b.segment, Opcode.WRITE, [move])
    assert refused == (TransferStatus.COMPLETED, Reason.NONE, bytes([Reason.ACCESS_DENIED]))
    assert host_b.ask("digest", 1) == before
    assert host_a.run(host_b.segment, Opcode.READ, [(local.key, 0, host_b.keys[0], 0, 4096)]) == COMPLETED


@pytest.mark.parametrize("secret", [b"another", None])
def test_without_the_cluster_secret_nothing_is_set_up(host_b: HostB, secret: bytes | None) -> None:
    host = HostA(secret=secret)
    try:
        local = host.register(bytearray(100))
        outcome = host.run(host_b.segment, Opcode.READ, [(local.key, 0, host_b.keys[0], 0, 100)])
        assert outcome == (TransferStatus.REFUSED, Reason.UNAUTHENTICATED, None)
        assert host.transport.endpoints == 0
    finally:
        host.close()


def test_a_nic_that_is_none_of_the_peers_is_no_path(host_a: HostA, host_b: HostB) -> None:
    local = host_a.register(bytearray(100))
    move = (local.key, 0, host_b.keys[0], 0, 100)
    for path in (Path("rdma", "rxe_a0", "rxe_a1"), Path("rdma", "rxe_b0", "rxe_b0"), Path("rdma", "rxe_a0", "none")):
        outcome = host_a.run(host_b.segment, Opcode.READ, [move], path)
        assert (outcome.status, outcome.reason) == (TransferStatus.FAILED, Reason.CONNECT_FAILED)
    assert host_a.transport.probe(host_b.segment, RAIL_0, threading.TIMEOUT_MAX)
    assert not host_a.transport.probe(host_b.segment, Path("rdma", "rxe_a0", "none"), threading.TIMEOUT_MAX)


def test_endpoints_are_capped_and_evicted_and_made_again(host_b: HostB) -> None:
    limits = replace(LIMITS, max_endpoints=1)
    host = HostA(limits)
    try:
        local = host.register(bytearray(4096))
        before = resources()["qp"]
        for path in (RAIL_0, RAIL_1) * 3:
            move = (local.key, 0, host_b.keys[0], 0, 4096)
            assert host.run(host_b.segment, Opcode.READ, [move], path) == COMPLETED
            assert host.transport.endpoints == 1
            # The peer's queue pair ends as well.
            wait_until(lambda: resources()["qp"] == before + 2, "one queue pair at each end")
    finally:
        host.close()


def test_the_peer_evicts_a_resting_link_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "REST_S", 0.3)
    limits = replace(LIMITS, max_inbound=1)
    far = pattern(4096, 6)
    with TransferEngine(
        network=Network([rdma_nic("b0")]), secret=SECRET, limits=limits, transports=("rdma",)
    ) as server:
        key = server.register_local_memory(far).key
        segment = server.descriptor()
        hosts = [HostA(), HostA()]
        try:
            for turn in range(4):
                host = hosts[turn % 2]
                near = bytearray(4096)
                move = (host.register(near).key, 0, key, 0, 4096)
                # Refused while the other host's link counts as in use.
                wait_until(lambda host=host, move=move: host.run(segment, Opcode.READ, [move]) == COMPLETED, "room")
                assert near == far
        finally:
            for host in hosts:
                host.close()


def test_an_unregistered_region_is_out_of_reach_at_once(host_a: HostA, host_b: HostB) -> None:
    near = bytearray(SIZE)
    local = host_a.register(near)
    key = bytes.fromhex(host_b.ask("register", 0))
    number = 3
    stop = threading.Event()
    outcomes: list[object] = []
    moves = [(local.key, at, key, at, 1 << 19) for at in range(0, SIZE, 1 << 19)]

    def write() -> None:
        while not stop.is_set():
            near[:] = bytes([len(outcomes) % 251]) * SIZE
            outcomes.append(host_a.run(host_b.segment, Opcode.WRITE, moves))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: len(outcomes) >= 2, "two rounds")
        left = host_b.ask("unregister", number)
        wait_until(lambda: outcomes[-1] != COMPLETED, "a refusal")
    finally:
        stop.set()
        writer.join(GENEROUS_S)
    refused = (TransferStatus.COMPLETED, Reason.NONE, bytes([Reason.UNKNOWN_REGION] * len(moves)))
    assert set(outcomes) == {COMPLETED, refused}
    assert host_b.ask("digest", number) == left
    # The same peer still serves the other regions.
    assert host_a.run(host_b.segment, Opcode.READ, [(local.key, 0, host_b.keys[0], 0, SIZE)]) == COMPLETED


def test_one_regions_end_is_not_the_others(host_a: HostA, host_b: HostB) -> None:
    """A chain that touches a region which is unregistered meanwhile fails there and completes elsewhere."""
    local = host_a.register(pattern(8192, 7))
    key = bytes.fromhex(host_b.ask("register", 0))
    moves = [(local.key, 0, host_b.keys[0], 0, 4096), (local.key, 4096, key, 0, 4096)]
    assert host_a.run(host_b.segment, Opcode.WRITE, moves) == COMPLETED
    host_b.ask("unregister", 4)
    refused = (TransferStatus.COMPLETED, Reason.NONE, bytes([0, Reason.UNKNOWN_REGION]))
    assert host_a.run(host_b.segment, Opcode.WRITE, moves) == refused


def test_a_stopped_chain_ends_soon_and_nothing_lands_later(host_a: HostA, host_b: HostB) -> None:
    near = bytearray(LONG)
    local = host_a.register(near)
    moves = [(local.key, at, host_b.keys[1], 0, SIZE) for at in range(0, LONG, SIZE)]
    running = Running(host_a, host_a.chain(host_b.segment, Opcode.READ, moves))
    wait_until(lambda: near[0] != 0, "the first byte")
    running.chain.stop(ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED))
    assert running.wait().status is not TransferStatus.COMPLETED
    at_the_end = digest(near)
    little = (host_a.register(bytearray(9)).key, 0, host_b.keys[0], 0, 9)
    assert host_a.run(host_b.segment, Opcode.READ, [little]) == COMPLETED
    assert digest(near) == at_the_end


@pytest.mark.parametrize("opcode", Opcode)
@pytest.mark.parametrize("fault", ["down", "unplug"])
def test_a_nic_that_goes_in_mid_transfer_ends_the_path_quickly(
    host_a: HostA, host_b: HostB, fault: str, opcode: Opcode
) -> None:
    near = pattern(LONG, 8)
    local = host_a.register(near)
    moves = [(local.key, at, host_b.keys[0], 0, SIZE) for at in range(0, LONG, SIZE)]
    assert host_a.run(host_b.segment, opcode, moves[:1]) == COMPLETED
    sent = packets_of("va0")
    running = Running(host_a, host_a.chain(host_b.segment, opcode, moves))
    wait_until(lambda: packets_of("va0") > sent + 200, "bytes on the wire")
    gone = time.monotonic()
    nic(fault, "a0")
    outcome = running.wait()
    print(f"{fault}: {outcome} after {time.monotonic() - gone:.2f} s")
    at_the_end = digest(near[SIZE:])
    assert outcome.status is not TransferStatus.COMPLETED
    assert outcome.reason.is_path_failure
    assert host_a.transport.endpoints == 0
    # The other rail continues behind the fence.
    fence = running.chain.fence
    assert bool(fence) is (opcode is Opcode.WRITE)
    assert host_a.run(host_b.segment, opcode, moves[:1], RAIL_1, fence) == COMPLETED
    host_a.transport.maintain(0.0)  # releases the device, so that it can go
    if fault == "unplug":
        wait_until(lambda: "rxe_a0" not in devices(), "the device is gone")
    nic("plug" if fault == "unplug" else "up", "a0")
    wait_until(lambda: host_a.run(host_b.segment, opcode, moves[:1]) == COMPLETED, "the NIC is back")
    assert digest(near[SIZE:]) == at_the_end  # nothing arrived late


def packets_of(interface: str) -> int:
    return int(FilePath(f"/sys/class/net/{interface}/statistics/tx_packets").read_text(encoding="ascii")) + int(
        FilePath(f"/sys/class/net/{interface}/statistics/rx_packets").read_text(encoding="ascii")
    )


def devices() -> set[str]:
    return {entry.name for entry in FilePath("/sys/class/infiniband").iterdir()}


@pytest.mark.parametrize("opcode", Opcode)
def test_silence_on_the_wire_is_found_by_the_nics_retries(
    host_a: HostA, monkeypatch: pytest.MonkeyPatch, opcode: Opcode
) -> None:
    """The peer's queue pair is gone but its control link remains, so only missing acknowledgements show the loss."""
    answering: list[QueuePair] = []

    class Recorded(QueuePair):
        def __init__(self, hca: Hca, pd: Any, *, posts: bool) -> None:
            super().__init__(hca, pd, posts=posts)
            answering.append(self)

    monkeypatch.setattr(rdma_server, "QueuePair", Recorded)
    with TransferEngine(
        network=Network([rdma_nic("b0")]), secret=SECRET, limits=LIMITS, transports=("rdma",)
    ) as server:
        move = (host_a.register(bytearray(4096)).key, 0, server.register_local_memory(bytearray(4096)).key, 0, 4096)
        assert host_a.run(server.descriptor(), opcode, [move]) == COMPLETED
        answering[0].close()
        began = time.monotonic()
        # not STALLED: the NIC gave up before we did
        assert host_a.run(server.descriptor(), opcode, [move]) == (TransferStatus.FAILED, Reason.CONNECTION_LOST, None)
        print(f"found after {time.monotonic() - began:.2f} s")
        assert host_a.run(server.descriptor(), opcode, [move]) == COMPLETED


@pytest.mark.parametrize("opcode", Opcode)
def test_a_killed_peer_ends_the_chain_at_once(host_a: HostA, opcode: Opcode) -> None:
    host_b = HostB(SIZE)
    try:
        local = host_a.register(bytearray(LONG))
        moves = [(local.key, at, host_b.keys[0], 0, SIZE) for at in range(0, LONG, SIZE)]
        sent = packets_of("va0")
        running = Running(host_a, host_a.chain(host_b.segment, opcode, moves))
        wait_until(lambda: packets_of("va0") > sent + 200, "bytes on the wire")
        host_b.kill()
        outcome = running.wait()
        assert outcome == (TransferStatus.FAILED, Reason.CONNECTION_LOST, None)
        again = host_a.run(host_b.segment, opcode, moves[:1])
        assert (again.status, again.reason) == (TransferStatus.FAILED, Reason.CONNECT_FAILED)
    finally:
        host_b.close()


def test_a_frozen_peer_is_served_by_its_nic(host_a: HostA, host_b: HostB) -> None:
    near = pattern(SIZE, 9)
    local = host_a.register(near)
    move = (local.key, 0, host_b.keys[0], 0, SIZE)
    assert host_a.run(host_b.segment, Opcode.WRITE, [move]) == COMPLETED
    host_b.freeze()
    try:
        near[:] = pattern(SIZE, 10)
        assert host_a.run(host_b.segment, Opcode.WRITE, [move]) == COMPLETED
        # A request that needs the peer's processor ends at the stall limit.
        unknown = host_a.run(host_b.segment, Opcode.WRITE, [(local.key, 0, bytes(16), 0, 1)])
        assert (unknown.status, unknown.reason) == (TransferStatus.TIMEOUT, Reason.STALLED)
    finally:
        host_b.thaw()
    assert host_b.ask("digest", 0) == digest(near)


def test_the_engine_completes_everything_while_nics_go_and_come(host_b: HostB) -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    nics = [rdma_nic("a0"), rdma_nic("a1")]
    near, back = bytearray(SIZE), bytearray(SIZE)
    key = host_b.keys[0]
    with TransferEngine(network=Network(nics), secret=SECRET, limits=LIMITS, transports=("rdma",)) as engine:
        source, target = engine.register_local_memory(near), engine.register_local_memory(back)
        step = SIZE // 64

        def requests(opcode: Opcode, region: bytes) -> list[TransferRequest]:
            return [TransferRequest(opcode, region, at, host_b.segment, key, at, step) for at in range(0, SIZE, step)]

        for turn in range(4):
            victim, fault, repair = (
                rng.choice(["a0", "a1", "b0", "b1"]),
                *rng.choice([("down", "up"), ("unplug", "plug")]),
            )
            near[:] = pattern(SIZE, 100 + turn)
            sent = packets_of("va0") + packets_of("va1")
            handle = engine.submit(requests(Opcode.WRITE, source.key))
            wait_until(lambda sent=sent: packets_of("va0") + packets_of("va1") > sent + 50, "bytes on the wire")
            nic(fault, victim)
            assert {result.status for result in handle.wait(GENEROUS_S)} == {TransferStatus.COMPLETED}
            results = engine.transfer(requests(Opcode.READ, target.key))
            assert {result.status for result in results} == {TransferStatus.COMPLETED}
            assert back == near
            if fault == "unplug":
                wait_until(lambda victim=victim: f"rxe_{victim}" not in devices(), "the device is gone")
            nic(repair, victim)
            print(turn, victim, fault, engine.stats().paths)
    assert host_b.ask("digest", 0) == digest(near)
