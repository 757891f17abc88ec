"""Keys to memory ranges between live engines, over all transports but rdma (tested in the guest): they open no more."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pinyon.transfer import (
    Access,
    EngineClosed,
    Grant,
    Opcode,
    Reason,
    Region,
    TransferEngine,
    TransferLimitReached,
    TransferLimits,
    TransferRequest,
    TransferResult,
    TransferStatus,
    Transports,
)
from pinyon.transfer.transports.shm.cma import shm_available
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.transports.tcp.wire import checksum, seed_of
from tests.unit.transfer.conftest import raw_link
from tests.waiting import wait_until

SIZE = 1 << 20
GENEROUS_S = 60.0
link_ids = itertools.count(1)
READ, WRITE = Opcode.READ, Opcode.WRITE


@dataclass
class Pair:
    """A server whose memory no key opens yet, and a client."""

    client: TransferEngine
    server: TransferEngine
    near: bytearray
    far: bytearray
    local: Region
    region: Region
    ahead_s: list[float] = field(default_factory=lambda: [0.0])
    """Seconds by which the server's clock is ahead."""

    def move(self, opcode: Opcode, grant: Grant | bytes, offset: int, length: int) -> TransferResult:
        key = grant if isinstance(grant, bytes) else grant.key
        request = TransferRequest(opcode, self.local.key, 0, self.server.descriptor([]), key, offset, length)
        (result,) = self.client.transfer([request])
        return result

    def refused(self, opcode: Opcode, grant: Grant | bytes, offset: int, length: int) -> Reason:
        """Checks that a move is refused and touches neither side; returns the reason."""
        near, far = bytes(self.near), bytes(self.far)
        result = self.move(opcode, grant, offset, length)
        assert result.status is TransferStatus.REFUSED, result
        assert (self.near, self.far) == (near, far)
        return result.reason


VARIANTS: dict[str, dict[str, Any]] = {
    "local": {"transports": ("local",)},
    "shm": {"transports": ("shm",)},
    "tcp": {"transports": ("tcp",)},
    "tcp-unchecked": {"transports": Transports(("tcp",), checksum="off"), "secret": b"cluster secret"},
}


@pytest.fixture(params=list(VARIANTS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    arguments = VARIANTS[request.param]
    if request.param == "shm" and (reason := shm_available()) is not None:
        pytest.skip(reason)
    yield from pairs(arguments, same_process=request.param == "local")


def pairs(arguments: dict[str, Any], *, same_process: bool) -> Iterator[Pair]:
    """Yields one pair and ends it afterwards."""
    ahead = [0.0]
    limits = TransferLimits(stall_s=10.0)
    rng = random.Random(1)
    with TransferEngine(limits=limits, clock=lambda: time.monotonic() + ahead[0], **arguments) as server:
        client = server
        if not same_process:
            client = TransferEngine(limits=limits, **arguments)
            client.start()
        near, far = bytearray(rng.randbytes(SIZE)), bytearray(rng.randbytes(SIZE))
        region = server.register_local_memory(far, access=Access.NONE)
        yield Pair(client, server, near, far, client.register_local_memory(near), region, ahead)
        assert server.stats().grants_now == 0, "the test takes back what it gave"
        client.close()


@pytest.mark.parametrize("length", [100, 4096, 300_000])
def test_a_key_opens_only_its_ranges_in_its_direction(pair: Pair, length: int) -> None:
    at, other = 1000, 400_000
    both = [(at, length), (other, length)]
    reader = pair.server.grant(pair.region, both, Access.READ)
    writer = pair.server.grant(pair.region, both, Access.WRITE)
    anyone = pair.server.grant(pair.region, [(at, length)], Access.READ_WRITE)
    assert len({pair.region.key, reader.key, writer.key, anyone.key}) == 4
    assert min(len(each.key) for each in (reader, writer, anyone)) == 16
    for offset in (at, other, at + 7):
        size = length - 7
        assert pair.move(READ, reader, offset, size).ok
        assert pair.near[:size] == pair.far[offset : offset + size]
        pair.near[:size] = secrets.token_bytes(size)
        assert pair.move(WRITE, writer, offset, size).ok
        assert pair.far[offset : offset + size] == pair.near[:size]
    assert pair.move(READ, anyone, at, length).ok
    assert pair.move(WRITE, anyone, at, length).ok
    outside = [
        *((at - 1, length), (at + 1, length), (at + length, 1), (0, 1), (other - 1, 2), (at, other - at + length)),
        *((SIZE, 1), (SIZE - 1, 2), ((1 << 62) - 1, length)),
    ]
    for offset, size in outside:
        assert pair.refused(READ, reader, offset, size) is Reason.OUT_OF_RANGE
        assert pair.refused(WRITE, writer, offset, size) is Reason.OUT_OF_RANGE
    assert pair.refused(READ, anyone, other, length) is Reason.OUT_OF_RANGE, "another's range"
    assert pair.refused(WRITE, reader, at, length) is Reason.ACCESS_DENIED
    assert pair.refused(READ, writer, at, length) is Reason.ACCESS_DENIED
    for opcode in Opcode:
        assert pair.refused(opcode, secrets.token_bytes(16), at, length) is Reason.UNKNOWN_REGION
        assert pair.refused(opcode, pair.region.key, at, length) is Reason.ACCESS_DENIED
    for grant in (reader, writer, anyone):
        assert pair.server.revoke_now(grant) or pair.server.revoke(grant) is None


@pytest.mark.parametrize("length", [100, 300_000])
def test_a_key_that_was_taken_back_opens_nothing(pair: Pair, length: int) -> None:
    for access, opcode in ((Access.READ, READ), (Access.WRITE, WRITE)):
        grant = pair.server.grant(pair.region, [(0, length)], access)
        again = pair.server.grant(pair.region, [(0, length)], access)
        assert grant.key != again.key
        assert pair.move(opcode, grant, 0, length).ok
        pair.server.revoke(grant)
        pair.server.revoke(grant)
        assert pair.refused(opcode, grant, 0, length) is Reason.UNKNOWN_REGION
        assert pair.move(opcode, again, 0, length).ok, "another key to the same range is not concerned"
        pair.server.revoke(again)
    served = pair.server.stats().served_refusals
    assert set(served) <= {"unknown_region"}


@pytest.mark.parametrize("length", [100, 300_000])
def test_a_key_ends_by_its_time(pair: Pair, length: int) -> None:
    reader = pair.server.grant(pair.region, [(0, length)], Access.READ, lifetime_s=60.0)
    writer = pair.server.grant(pair.region, [(0, length)], Access.WRITE, lifetime_s=60.0)
    pair.ahead_s[0] += 59.0
    assert pair.move(READ, reader, 0, length).ok
    assert pair.move(WRITE, writer, 0, length).ok
    pair.ahead_s[0] += 1.0
    assert pair.refused(WRITE, writer, 0, length) is Reason.UNKNOWN_REGION
    # A shm reader asked before, so the seal breaks at the next look at the clock.
    wait_until(lambda: pair.move(READ, reader, 0, length).status is TransferStatus.REFUSED, "the reader's end")
    assert pair.refused(READ, reader, 0, length) is Reason.UNKNOWN_REGION
    wait_until(lambda: pair.server.stats().grants_now == 0, "forgotten without anybody's doing")


def test_keys_of_an_earlier_life_are_refused() -> None:
    with TransferEngine(transports=("tcp",)) as client:
        near = bytearray(100)
        local = client.register_local_memory(near)
        with TransferEngine(transports=("tcp",)) as first:
            region = first.register_local_memory(bytearray(b"x" * 100), access=Access.NONE)
            grant = first.grant(region, [(0, 100)], Access.READ_WRITE)
            segment, port = first.descriptor([grant]), first.descriptor([]).port
            old = TransferRequest(READ, local.key, 0, segment, grant.key, 0, 100)
            assert client.transfer([old])[0].ok
        near[:] = bytes(100)
        with TransferEngine(port=port, transports=("tcp",)) as second:
            again = second.register_local_memory(bytearray(b"y" * 100), access=Access.NONE)
            second.grant(again, [(0, 100)], Access.READ)
            results = client.transfer([old])
            assert results == [TransferResult(TransferStatus.REFUSED, 0, Reason.STALE_SEGMENT)]
            assert results[0].reason.is_stale
            forged = old._replace(remote=second.descriptor([]))
            assert client.transfer([forged])[0].reason is Reason.UNKNOWN_REGION
    assert near == bytes(100)


def test_the_end_of_a_region_ends_its_grants(pair: Pair) -> None:
    grants = [pair.server.grant(pair.region, [(at, 64)], Access.READ_WRITE) for at in (0, 64)]
    assert pair.move(READ, grants[0], 0, 64).ok
    pair.server.unregister(pair.region)
    assert pair.server.stats().grants_now == 0
    for opcode in Opcode:
        assert pair.refused(opcode, grants[0], 0, 64) is Reason.UNKNOWN_REGION
    pair.server.revoke(grants[0])


def test_an_engine_that_is_closed_says_so() -> None:
    with TransferEngine() as engine:
        region = engine.register_local_memory(bytearray(64), access=Access.NONE)
        grant = engine.grant(region, [(0, 1)], Access.READ)
    assert engine.revoke_now(grant)
    with pytest.raises(EngineClosed):  # a peer that asked is told that this process is to blame
        engine.grant(region, [(0, 1)], Access.READ)


def test_grants_and_their_ranges_are_limited() -> None:
    with TransferEngine(limits=TransferLimits(max_grants=3, max_grant_ranges=5)) as engine:
        region = engine.register_local_memory(bytearray(64), access=Access.NONE)
        grants = [engine.grant(region, [(0, 1), (2, 1)], Access.READ) for _ in range(2)]
        with pytest.raises(TransferLimitReached, match="ranges"):
            engine.grant(region, [(0, 1), (2, 1)], Access.READ)
        grants.append(engine.grant(region, [(0, 1), (1, 1)], Access.READ))  # one range
        engine.revoke(grants.pop(0))
        grants.append(engine.grant(region, [(0, 1)], Access.READ))
        with pytest.raises(TransferLimitReached, match="grants"):
            engine.grant(region, [(0, 1)], Access.READ)
        assert engine.stats().grants_now == 3


# --- peers that write their own frames ---


@pytest.fixture
def server() -> Iterator[TransferEngine]:
    with TransferEngine(transports=("tcp",), limits=TransferLimits(stall_s=1.0, max_inbound=64)) as engine:
        yield engine


def begun(server: TransferEngine, sock: socket.socket, grant: Grant, far: bytearray, half: int) -> None:
    """Sends the first half of a WRITE over all of ``far``, and waits for its arrival."""
    sock.sendall(wire.pack_frame(wire.Frame(WRITE, 1, 1, len(far)), [(grant.key, 0, len(far))]) + b"\x77" * half)
    wait_until(lambda: far[half - 1] == 0x77, "half of it has come")


@pytest.fixture
def patient() -> Iterator[TransferEngine]:
    """An engine that cuts off no peer for the slowness of the machine."""
    with TransferEngine(transports=("tcp",), limits=TransferLimits(stall_s=GENEROUS_S)) as engine:
        yield engine


def test_a_frame_under_way_is_settled_before_its_key_is_gone(patient: TransferEngine) -> None:
    server, far = patient, bytearray(400_000)
    region = server.register_local_memory(far, access=Access.NONE)
    grant = server.grant(region, [(0, len(far))], Access.WRITE)
    other = server.grant(region, [(0, 1)], Access.READ)
    with (
        raw_link(server.descriptor([]), next(link_ids)) as sock,
        raw_link(server.descriptor([]), next(link_ids)) as second,
    ):
        begun(server, sock, grant, far, 200_000)
        assert not server.revoke_now(grant)
        second.sendall(wire.pack_frame(wire.Frame(WRITE, 1, 1, 4), [(grant.key, 0, 4)]) + b"late")
        head = second.recv(wire.FRAME_HEADER_BYTES + 1, socket.MSG_WAITALL)
        assert head[-1] == Reason.UNKNOWN_REGION, "nothing new begins"
        assert server.revoke_now(other), "another key is not waited for"
        revoking = threading.Thread(target=server.revoke, args=(grant,))
        revoking.start()
        sock.sendall(b"\x77" * 200_000)
        reply = sock.recv(wire.FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        assert wire.parse_reply(reply, wire.Frame(WRITE, 1, 1, 400_000))[0] == wire.ALL_OK
        revoking.join(GENEROUS_S)
        assert not revoking.is_alive()
    assert far == b"\x77" * len(far)


def test_a_frame_that_does_not_end_is_cut_before_its_key_is_gone(server: TransferEngine) -> None:
    far = bytearray(400_000)
    region = server.register_local_memory(far, access=Access.NONE)
    grant = server.grant(region, [(0, len(far))], Access.WRITE)
    with raw_link(server.descriptor([]), next(link_ids)) as sock:
        begun(server, sock, grant, far, 200_000)
        server.revoke(grant)
        far[:] = bytes(len(far))  # the memory serves other data now
        with contextlib.suppress(OSError):  # the kernel may take some bytes before it knows of the end
            sock.sendall(b"\x77" * 200_000)
        wait_until(lambda: server.stats().inbound_connections_now == 0, "the link has ended")
    assert far == bytes(len(far))


class Hostile:
    """Frames of all kinds against a server with grants, and a model of their allowed effects."""

    def __init__(self, server: TransferEngine, rng: random.Random) -> None:
        self.rng = rng
        self.size = 4096
        self.memory = bytearray(rng.randbytes(self.size))
        region = server.register_local_memory(self.memory, access=Access.NONE)
        self.others = bytearray(rng.randbytes(self.size))
        server.register_local_memory(self.others, access=Access.NONE)

        def grant(access: Access, *ranges: tuple[int, int]) -> tuple[bytes, int, set[int]]:
            made = server.grant(region, ranges, access)
            return made.key, int(access), {byte for at, size in ranges for byte in range(at, at + size)}

        self.keys = [
            grant(Access.READ, (100, 400), (900, 64)),
            grant(Access.WRITE, (600, 200), (1000, 1)),
            grant(Access.READ_WRITE, (2000, 1000)),
            grant(Access.READ_WRITE, (700, 150)),  # overlaps the one above
        ]
        gone = server.grant(region, [(0, self.size)], Access.READ_WRITE)
        server.revoke(gone)
        self.keys += [(gone.key, -1, set()), (region.key, 0, set()), (rng.randbytes(16), -1, set())]
        self.writable: set[int] = {
            byte for _, rights, opened in self.keys if rights & 2 and rights > 0 for byte in opened
        }

    def ranges(self) -> list[tuple[int, int, int]]:
        """Returns ``(index of the key, offset, length)``, most of them near some border."""
        rng = self.rng
        made = []
        for _ in range(rng.choice([1, 1, 2, 5])):
            edge = rng.choice([0, 100, 500, 600, 800, 900, 964, 1000, 2000, 3000, self.size, 1 << 63, (1 << 64) - 1])
            offset = min(max(edge + rng.randint(-20, 20), 0), (1 << 64) - 1)
            made.append((rng.randrange(len(self.keys)), offset, rng.choice([1, 1, 10, 100, 1000])))
        return made

    def code(self, opcode: Opcode, index: int, offset: int, length: int) -> int:
        _, rights, opened = self.keys[index]
        if rights < 0:
            return Reason.UNKNOWN_REGION
        if not rights & (1 if opcode is READ else 2):
            return Reason.ACCESS_DENIED
        inside = offset + length <= self.size and opened.issuperset(range(offset, offset + length))
        return 0 if inside else Reason.OUT_OF_RANGE

    def frame(self, opcode: Opcode, ranges: list[tuple[int, int, int]], number: int) -> tuple[wire.Frame, bytes, bytes]:
        frame = wire.Frame(opcode, len(ranges), number, sum(length for *_, length in ranges), self.rng.random() < 0.5)
        head = wire.pack_frame(frame, [(self.keys[index][0], at, length) for index, at, length in ranges])
        payload = self.rng.randbytes(frame.payload) if opcode is WRITE else b""
        trailer = b""
        if frame.checksum and opcode is WRITE:
            trailer = wire.pack_trailer(checksum([memoryview(payload)], seed_of(head)))
        return frame, payload, head + payload + trailer


def test_a_hostile_peer_reaches_only_what_its_keys_open(server: TransferEngine) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    hostile = Hostile(server, rng)
    model, others = bytearray(hostile.memory), bytes(hostile.others)
    with raw_link(server.descriptor([]), next(link_ids)) as sock:
        for number in range(8000):
            opcode, ranges = rng.choice([READ, WRITE]), hostile.ranges()
            frame, payload, data = hostile.frame(opcode, ranges, number)
            codes = [hostile.code(opcode, *one) for one in ranges]
            expected = bytearray()
            at = 0
            for (_, offset, length), code in zip(ranges, codes, strict=True):
                if not code and opcode is READ:
                    expected += model[offset : offset + length]
                elif not code:
                    model[offset : offset + length] = payload[at : at + length]
                at += length
            sock.sendall(data)
            code, size = wire.parse_reply(sock.recv(wire.FRAME_HEADER_BYTES, socket.MSG_WAITALL), frame)
            refused = bytes(len(ranges))
            if code == wire.SOME_REFUSED:
                refused = sock.recv(len(ranges), socket.MSG_WAITALL)
            assert list(refused) == codes
            assert size == len(expected)
            trailer = wire.TRAILER_BYTES if frame.checksum and opcode is READ else 0
            if expected or trailer:
                assert sock.recv(len(expected) + trailer, socket.MSG_WAITALL)[: len(expected)] == expected
            assert hostile.memory == model
    for number in range(2000):  # now invalid frames
        data = bytearray(
            b"".join(hostile.frame(rng.choice([READ, WRITE]), hostile.ranges(), number)[2] for _ in range(2))
        )
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with raw_link(server.descriptor([]), next(link_ids)) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except OSError:
                pass  # the link may have been cut
    wait_until(lambda: server.stats().inbound_connections_now == 0, "all links have ended")
    assert hostile.others == others
    for place, (before, after) in enumerate(zip(model, hostile.memory, strict=True)):
        assert before == after or place in hostile.writable, f"byte {place} changed"
    assert {"unknown_region", "access_denied", "out_of_range"} == set(server.stats().served_refusals)
    with raw_link(server.descriptor([]), next(link_ids)) as sock:  # the server still serves
        key = hostile.keys[0][0]
        sock.sendall(wire.pack_frame(wire.Frame(READ, 1, 1, 400), [(key, 100, 400)]))
        answer = sock.recv(wire.FRAME_HEADER_BYTES + 400, socket.MSG_WAITALL)
        assert answer[wire.FRAME_HEADER_BYTES :] == hostile.memory[100:500]
