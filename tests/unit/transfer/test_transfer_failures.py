"""Peers that die, freeze, restart, lie or send nonsense, and leave nothing behind."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pinyon.transfer import (
    Access,
    Opcode,
    Reason,
    Region,
    SegmentDescriptor,
    TransferEngine,
    TransferLimits,
    TransferRequest,
    TransferStatus,
)
from pinyon.transfer.chains.chain import Chain, ChainOutcome
from pinyon.transfer.links import handshake
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.submissions import Submissions
from pinyon.transfer.transports.tcp import wire
from tests.on_compiled import REPLACES_METHODS
from tests.unit.transfer.conftest import (
    FAST,
    GENEROUS_S,
    PATIENT,
    Pair,
    cut_links,
    eventually,
    nothing_left_behind,
    transfer_threads,
)
from tests.unit.transfer.listeners import LyingServer

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 8 << 20


def tcp_engine(limits: TransferLimits = PATIENT, **arguments: Any) -> TransferEngine:
    return TransferEngine(transports=("tcp",), limits=limits, **arguments)


@pytest.fixture
def engine():
    with tcp_engine() as one:
        yield one


@pytest.fixture
def hasty():
    """An engine with short limits, for tests that wait for a stall."""
    with tcp_engine(FAST) as one:
        yield one


def hundred_bytes(initiator: TransferEngine, server: TransferEngine) -> TransferRequest:
    """Returns a WRITE of a hundred bytes between memories that are registered for it."""
    return Pair.of(initiator, server, bytearray(100), bytearray(100)).request(WRITE, 0, 0, 100)


def big_batch(local, peer, opcode, count=200):
    """Returns 1.6 GB of requests through 8 MiB of memory, surely unfinished when the peer is hit."""
    return [TransferRequest(opcode, local.key, 0, peer.segment, peer.key, 0, SIZE)] * count


def some_moved(handle):
    eventually(lambda: any(one.ok for one in handle.results()), "some requests are done")


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_killed_peer_fails_quickly(engine, start_peer, opcode) -> None:
    local = engine.register_local_memory(bytearray(SIZE))
    peer = start_peer(SIZE)
    handle = engine.submit(big_batch(local, peer, opcode))
    some_moved(handle)
    peer.kill()
    late = engine.submit(big_batch(local, peer, opcode))  # in case the first ones end before
    results = handle.wait(GENEROUS_S) + late.wait(GENEROUS_S)
    assert {one.status for one in results} == {TransferStatus.COMPLETED, TransferStatus.FAILED}
    assert {one.reason for one in results} <= {Reason.NONE, Reason.CONNECTION_LOST, Reason.CONNECT_FAILED}
    (result,) = engine.transfer(big_batch(local, peer, opcode, 1))
    assert (result.status, result.reason) == (TransferStatus.FAILED, Reason.CONNECT_FAILED)
    eventually(lambda: engine.stats().outbound_connections_now == 0, "connections closed")
    assert engine.stats().requests_now == 0


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_frozen_peer_times_out_and_nothing_lands_late(hasty, start_peer, opcode) -> None:
    engine, memory = hasty, bytearray(SIZE)
    local = engine.register_local_memory(memory)
    peer = start_peer(SIZE)
    handle = engine.submit(big_batch(local, peer, opcode))
    some_moved(handle)
    peer.freeze()
    late = engine.submit(big_batch(local, peer, opcode))  # in case the first ones end before
    # 200 chains are queued: separate waits for a stall limit would outlast this deadline.
    results = handle.wait(GENEROUS_S) + late.wait(GENEROUS_S)
    assert {one.status for one in results} == {TransferStatus.COMPLETED, TransferStatus.TIMEOUT}
    assert {one.reason for one in results} == {Reason.NONE, Reason.STALLED}
    memory[:] = bytes(SIZE)
    peer.thaw()
    probe = TransferRequest(READ, local.key, 0, peer.segment, peer.key, 0, 1)
    eventually(lambda: engine.transfer([probe])[0].ok, "the peer answers again")
    assert not any(memory[1:])  # the thawed peer's answers went to closed sockets


def test_frozen_peer_before_the_handshake(hasty, start_peer) -> None:
    engine = hasty
    local = engine.register_local_memory(bytearray(SIZE))
    peer = start_peer(SIZE)
    peer.freeze()
    (result,) = engine.transfer(big_batch(local, peer, READ, 1))
    assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.STALLED)
    (result,) = engine.transfer(big_batch(local, peer, READ, 1), timeout_s=0.05)
    assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.DEADLINE)


async def test_cancel_against_a_frozen_peer_is_immediate(start_peer) -> None:
    import asyncio

    with tcp_engine(TransferLimits(stall_s=1000.0, connect_s=1000.0, base_deadline_s=1000.0)) as engine:
        local = engine.register_local_memory(bytearray(SIZE))
        peer = start_peer(SIZE)
        handle = engine.submit(big_batch(local, peer, READ))
        some_moved(handle)
        peer.freeze()
        async with asyncio.timeout(GENEROUS_S):
            waiting = asyncio.create_task(handle.wait_async())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert {one.status for one in handle.results()} <= {TransferStatus.COMPLETED, TransferStatus.CANCELLED}
        # A deadline shorter than the stall limit holds too, polled or waited for.
        polled = engine.submit(big_batch(local, peer, WRITE, 1), timeout_s=0.2)
        eventually(lambda: polled.done, "expired")
        assert polled.results()[0].status is TransferStatus.TIMEOUT
        eventually(lambda: engine.stats().requests_now == 0, "nothing in flight")
        peer.kill()  # unawaited handshakes would else hold up close()


def test_kills_and_freezes_at_random_points(engine, hasty, start_peer) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    memory = bytearray(SIZE)
    for _ in range(6):
        peer = start_peer(SIZE)
        opcode = rng.choice([READ, WRITE])
        frozen = rng.random() < 0.5
        one = hasty if frozen else engine
        local = one.register_local_memory(memory)
        handle = one.submit(big_batch(local, peer, opcode, 40))
        threading.Event().wait(rng.random() * 0.05)  # the random point
        if frozen:
            peer.freeze()
        else:
            peer.kill()
        bad = TransferStatus.TIMEOUT if frozen else TransferStatus.FAILED
        assert {result.status for result in handle.wait(60.0)} <= {TransferStatus.COMPLETED, bad}
        peer.close()
        one.unregister(local)
    assert engine.stats().requests_now == hasty.stats().requests_now == 0


def test_restarted_peer_is_stale(engine, start_peer) -> None:
    local = engine.register_local_memory(bytearray(SIZE))
    peer = start_peer(SIZE)
    segment = peer.segment
    other = SegmentDescriptor(segment.host, segment.port, bytes(16), segment.regions)
    (result,) = engine.transfer([TransferRequest(READ, local.key, 0, other, peer.key, 0, 10)])
    assert (result.status, result.reason) == (TransferStatus.REFUSED, Reason.STALE_SEGMENT)


@pytest.mark.parametrize(("mine", "theirs"), [(b"one", "two"), (b"one", ""), (None, "two")])
def test_secrets_must_agree(start_peer, mine, theirs) -> None:
    peer = start_peer(SIZE, theirs)
    with tcp_engine(secret=mine) as engine:
        local = engine.register_local_memory(bytearray(SIZE))
        (result,) = engine.transfer(big_batch(local, peer, WRITE, 1))
        assert (result.status, result.reason) == (TransferStatus.REFUSED, Reason.UNAUTHENTICATED)


def test_server_asks_the_initiator_for_its_proof() -> None:
    """An initiator without the secret gets no further than the handshake."""
    with tcp_engine(secret=b"s") as server:
        descriptor = server.descriptor()
        with socket.create_connection((descriptor.host, descriptor.port), timeout=GENEROUS_S) as sock:
            sock.sendall(handshake.pack_hello(handshake.Hello(1, 0, bytes(16), descriptor.boot_id, bytes(16), True)))
            reply = sock.recv(handshake.HELLO_REPLY_BYTES, socket.MSG_WAITALL)
            assert handshake.parse_hello_reply(reply)[0] is handshake.HelloCode.OK
            sock.sendall(reply[-handshake.MAC_BYTES :])  # the server's own proof played back
            accept = sock.recv(handshake.ACCEPT_BYTES, socket.MSG_WAITALL)
            assert handshake.parse_accept(accept) is handshake.HelloCode.AUTH
            assert sock.recv(1) == b""
        assert server.stats().auth_failures == 1


def head(sock) -> None:
    sock.recv(wire.FRAME_HEADER_BYTES + wire.DESCRIPTOR_BYTES, socket.MSG_WAITALL)


def reset(sock) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_reset_leads_to_one_reconnect_that_fences_the_old_link(engine) -> None:
    def act(sock) -> None:
        head(sock)
        reset(sock)

    with LyingServer(act) as server:
        local = engine.register_local_memory(bytearray(100))
        (result,) = engine.transfer([TransferRequest(WRITE, local.key, 0, server.segment, bytes(16), 0, 100)])
        assert (result.status, result.reason) == (TransferStatus.FAILED, Reason.CONNECTION_LOST)
        assert [one.replaces for one in server.hellos] == [0, server.hellos[0].connection_id]
        assert engine.stats().retries == 1


@pytest.mark.parametrize(
    "answer",
    [
        random.Random(1).randbytes(wire.FRAME_HEADER_BYTES),
        wire.pack_reply(wire.Frame(1, 1, 2, 100), None, 100),  # another frame's
        wire.pack_reply(wire.Frame(1, 1, 1, 100), None, 101),
        wire.pack_reply(wire.Frame(1, 1, 1, 100), b"\x00", 100),  # a refusal that refuses nothing
        wire.pack_reply(wire.Frame(1, 1, 1, 100), b"\x09", 0),
        wire.pack_reply(wire.Frame(1, 1, 1, 100), b"\x01", 50),
    ],
    ids=("noise", "other number", "other size", "empty refusal", "unknown refusal", "half done"),
)
def test_lying_answers_end_the_connection_and_write_nothing(engine, answer) -> None:
    def act(sock) -> None:
        head(sock)
        sock.sendall(answer)
        sock.recv(1)

    memory = bytearray(100)
    with LyingServer(act) as server:
        local = engine.register_local_memory(memory)
        (result,) = engine.transfer([TransferRequest(READ, local.key, 0, server.segment, bytes(16), 0, 100)])
        assert (result.status, result.reason) == (TransferStatus.FAILED, Reason.PROTOCOL)
        assert not any(memory)
        assert engine.stats().outbound_connections_now == 0


def test_trickling_peer_meets_the_total_deadline(engine) -> None:
    stop = threading.Event()

    def act(sock) -> None:
        head(sock)
        sock.sendall(wire.pack_reply(wire.Frame(1, 1, 1, 1000), None, 1000))
        try:
            while not stop.wait(0.05):
                sock.send(b"x")
        except OSError:
            pass

    with LyingServer(act) as server:
        local = engine.register_local_memory(bytearray(1000))
        request = TransferRequest(READ, local.key, 0, server.segment, bytes(16), 0, 1000)
        (result,) = engine.transfer([request], timeout_s=1.0)
        assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.DEADLINE)
        stop.set()


def test_a_link_that_the_peer_ended_is_made_anew(engine) -> None:
    with tcp_engine() as server:
        request = hundred_bytes(engine, server)
        assert engine.transfer([request])[0].ok
        assert server.stats().inbound_connections_now == 1
        cut_links(server._acceptor)
        assert engine.transfer([request])[0].ok  # reconnects
        assert engine.stats().retries == 1


def test_inbound_links_over_the_cap_take_turns(engine) -> None:
    with tcp_engine(replace(PATIENT, max_inbound=1)) as server, tcp_engine() as first:
        for initiator in (first, engine, first):
            assert initiator.transfer([hundred_bytes(initiator, server)])[0].ok


def test_strangers_that_say_nothing_keep_nobody_out(engine) -> None:
    """The silent strangers hold places of their own until their time is up; the oldest makes room for another."""
    with tcp_engine(replace(PATIENT, max_inbound=2)) as server, contextlib.ExitStack() as stack:
        request = hundred_bytes(engine, server)
        assert engine.transfer([request])[0].ok
        address = (server.descriptor().host, server.descriptor().port)
        silent = [stack.enter_context(socket.create_connection(address, GENEROUS_S)) for _ in range(80)]
        assert silent[0].recv(1) == b"", "the first one is cut"
        assert engine.transfer([request])[0].ok
        assert engine.stats().retries == 0, "its link was left alone"
        with tcp_engine() as another:
            assert another.transfer([hundred_bytes(another, server)])[0].ok
        silent[-1].settimeout(0)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_silent_links_of_one_address_displace_no_other() -> None:
    with (
        tcp_engine(limits=TransferLimits(max_inbound=2, connect_s=GENEROUS_S)) as server,
        contextlib.ExitStack() as stack,
    ):
        address = (server.descriptor().host, server.descriptor().port)

        def connected(source: str) -> socket.socket:
            return stack.enter_context(socket.create_connection(address, GENEROUS_S, source_address=(source, 0)))

        other = connected("127.0.0.2")
        crowd = [connected("127.0.0.1") for _ in range(80)]
        assert crowd[0].recv(1) == b"", "the oldest of those that are many is cut"
        assert crowd[10].recv(1) == b"", "and others of them after it"
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_endpoints_over_the_cap_take_turns() -> None:
    with tcp_engine(replace(PATIENT, max_endpoints=1)) as engine, tcp_engine() as one, tcp_engine() as two:
        for server in (one, two, one):
            request = hundred_bytes(engine, server)
            assert engine.transfer([request])[0].ok
            assert engine.submit([request]).wait()[0].ok
            assert engine.stats().outbound_connections_now == 1


def test_idle_connections_and_threads_go() -> None:
    limits = replace(PATIENT, idle_s=0.1)
    with tcp_engine(limits) as engine, tcp_engine() as server:
        request = hundred_bytes(engine, server)
        assert engine.submit([request]).wait()[0].ok
        eventually(lambda: engine.stats().outbound_connections_now == 0, "outbound closed")
        eventually(lambda: server.stats().inbound_connections_now == 0, "inbound closed")
        eventually(lambda: not any("out" in name for name in transfer_threads()), "threads ended")


def test_noise_at_the_port_hurts_nobody() -> None:
    rng = random.Random(3)
    with tcp_engine() as engine, tcp_engine() as server:
        memory = bytearray(1000)
        local, remote = engine.register_local_memory(bytearray(b"y" * 1000)), server.register_local_memory(memory)
        descriptor = server.descriptor()
        request = TransferRequest(WRITE, local.key, 0, descriptor, remote.key, 0, 1000)
        assert engine.transfer([request])[0].ok
        hello = handshake.pack_hello(handshake.Hello(1, 0, bytes(16), descriptor.boot_id, bytes(16), False))
        frame = wire.pack_frame(wire.Frame(WRITE, 1, 1, 1000), [(remote.key, 0, 1000)])
        memory[:] = bytes(1000)
        with nothing_left_behind():
            for round_number in range(60):
                with socket.create_connection((descriptor.host, descriptor.port), timeout=GENEROUS_S) as sock:
                    noise = rng.randbytes(rng.randrange(200))
                    if round_number % 3 == 1:
                        noise = hello + noise
                    elif round_number % 3 == 2:
                        at = rng.randrange(wire.FRAME_HEADER_BYTES)
                        noise = hello + frame[:at] + rng.randbytes(1) + frame[at + 1 :]
                    try:
                        sock.sendall(noise)
                        if round_number % 2:
                            sock.shutdown(socket.SHUT_WR)
                            while sock.recv(4096):
                                pass
                    except OSError:
                        pass
            assert engine.transfer([request])[0].ok
            eventually(lambda: server.stats().inbound_connections_now == 1, "noise connections closed")
        assert engine.stats().retries == 0  # the good connection survived
        assert server.stats().protocol_errors > 0


def test_nothing_is_left_behind(start_peer) -> None:
    start_peer(SIZE).close()  # starts all that is started once
    with nothing_left_behind():
        for _ in range(3):
            peer = start_peer(SIZE)
            with tcp_engine() as engine:
                local = engine.register_local_memory(bytearray(SIZE))
                handles = [engine.submit(big_batch(local, peer, opcode, 20)) for opcode in (READ, WRITE)]
                handles[0].cancel()
                handles[1].wait(60.0)
                engine.submit(big_batch(local, peer, READ, 20))
            peer.close()


class HeldUp(MemoryTable):
    """A table in which the first thread to release its regions is held up."""

    def __init__(self) -> None:
        super().__init__()
        self.holds, self.go = threading.Event(), threading.Event()

    def unpin(self, regions: Iterable[Region], holder: object) -> None:
        super().unpin(regions, holder)
        if not self.holds.is_set():
            self.holds.set()
            assert self.go.wait(GENEROUS_S)


@REPLACES_METHODS
def test_chains_of_one_request_may_report_in_any_order() -> None:
    """The chain that ends the request is heard first, another chain that ended before it later."""
    given: list[Chain] = []
    peers = SimpleNamespace(submit=given.append, moving={})
    memory = HeldUp()
    local = memory.register(bytearray(4 * SIZE), None, Access.READ)
    submissions = Submissions(EngineContext(bytes(16), memory, TransferLimits()), peers, lambda remote: 1)
    submissions.running = True
    remote = SegmentDescriptor("127.0.0.1", 1, bytes(16))
    handle = submissions.submit([TransferRequest(WRITE, local.key, 0, remote, bytes(16), 0, 4 * SIZE)], None)
    early, *others = given
    assert others
    completed = ChainOutcome(TransferStatus.COMPLETED)
    held_up = threading.Thread(target=early.finish, args=(completed,), daemon=True)
    held_up.start()
    assert memory.holds.wait(GENEROUS_S)
    for chain in others:
        chain.finish(completed)
    assert handle.results()[0].ok
    memory.go.set()
    held_up.join(GENEROUS_S)
    assert handle.wait(GENEROUS_S)[0].ok
    assert submissions.in_flight() == 0


def test_deadlines_go_by_the_clock_that_is_passed_in() -> None:
    now = 1000.0
    memory = MemoryTable()
    local = memory.register(bytearray(10), None, Access.READ)
    peers = SimpleNamespace(submit=lambda chain: None, moving={})
    context = EngineContext(bytes(16), memory, TransferLimits(), clock=lambda: now)
    submissions = Submissions(context, peers, lambda remote: 1)
    submissions.running = True
    remote = SegmentDescriptor("127.0.0.1", 1, bytes(16))
    handle = submissions.submit([TransferRequest(WRITE, local.key, 0, remote, bytes(16), 0, 10)], 5.0)
    now += 4.9
    assert not handle.done
    now += 0.2
    assert handle.done
    assert handle.results()[0] == (TransferStatus.TIMEOUT, 0, Reason.DEADLINE)
    assert submissions.in_flight() == 0


def test_a_silent_path_is_avoided_even_with_short_deadlines(engine, start_peer) -> None:
    local = engine.register_local_memory(bytearray(SIZE))
    peer = start_peer(SIZE)
    request = big_batch(local, peer, READ, 1)
    assert engine.transfer(request)[0].ok
    peer.freeze()
    (result,) = engine.transfer(request, timeout_s=0.5)
    assert (result.status, result.reason) == (TransferStatus.TIMEOUT, Reason.DEADLINE)
    ((_, path),) = engine.paths()
    assert not path.usable
    peer.thaw()
    eventually(lambda: engine.paths()[0][1].usable, "a probe brought the path back")
    assert engine.transfer(request)[0].ok
