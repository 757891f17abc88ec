"""The tcp transport below the engine: connections, fences, caps, checksums, polling, hostile bytes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pinyon.transfer import Access, Nic, Opcode, Reason, SegmentDescriptor, TransferLimits, TransferStatus
from pinyon.transfer.chains.chain import DONE, LOST, Chain, ChainOutcome
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.links import handshake, spinner
from pinyon.transfer.links.acceptor import Acceptor, InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.spinner import Spinner
from pinyon.transfer.links.stream import Stream
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.transports.tcp.transport import TcpTransport
from pinyon.transfer.transports.tcp.wire import checksum, seed_of
from pinyon.transfer.types.nic import Path
from tests.long import usually
from tests.unit.transfer.conftest import (
    GENEROUS_S,
    PATIENT,
    all_closed,
    cut_links,
    eventually,
    nothing_left_behind,
    raw_link,
    users,
)
from tests.unit.transfer.listeners import Proxy, Silent

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 1 << 20
FUZZED = 1 << 14
PATH = Path("tcp", "", "")
BAD_CHECKSUM = ChainOutcome(TransferStatus.FAILED, Reason.CHECKSUM)


class RecordingAcceptor(Acceptor):
    hellos: list[handshake.Hello]
    sources: list[str]
    streams: list[Stream]

    def admit(self, inbound: InboundLink, hello: handshake.Hello) -> handshake.HelloCode:
        self.hellos.append(hello)
        self.sources.append(inbound.stream.sock.getpeername()[0])
        self.streams.append(inbound.stream)
        return super().admit(inbound, hello)


class Host:
    """The tcp transport of one process, both ends, with one region."""

    def __init__(
        self,
        limits: TransferLimits = PATIENT,
        checksum: str = "off",
        nics: dict[str, Nic] | None = None,
        size: int = SIZE,
    ) -> None:
        self.memory = bytearray(size)
        self.table = MemoryTable()
        self.region = self.table.register(self.memory, "cpu:0", Access.READ_WRITE)
        self.context = EngineContext(os.urandom(16), self.table, limits)
        self.meter = self.context.meter
        self.tcp = TcpTransport(self.context, nics or {}, checked=checksum == "on")
        self.acceptor = RecordingAcceptor(self.context, {handshake.Service.TCP: self.tcp.service})
        self.acceptor.hellos, self.acceptor.sources, self.acceptor.streams = [], [], []
        self.port = self.acceptor.listen("127.0.0.1", 0)

    def segment(self, port: int | None = None) -> SegmentDescriptor:
        return SegmentDescriptor("127.0.0.1", port or self.port, self.context.boot_id, (self.region.descriptor(),))

    def chain(self, opcode: Opcode, remote: SegmentDescriptor, nbytes: int, timeout_s: float = GENEROUS_S) -> Chain:
        part = Slice(0, self.region.key, 0, remote.regions[0].key, 0, nbytes)
        plan = ChainPlan(remote, opcode, [part], nbytes)
        return Chain(plan, {self.region.key: self.region}, time.monotonic() + timeout_s, lambda chain, outcome: None)

    def run(self, opcode: Opcode, remote: SegmentDescriptor, nbytes: int = 4096) -> ChainOutcome:
        return self.tcp.run(self.chain(opcode, remote, nbytes), PATH)

    def close(self) -> None:
        self.tcp.close()
        self.acceptor.close()


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    with nothing_left_behind():
        yield from all_closed(Host)


# --- checksums ---


@pytest.mark.parametrize("nbytes", [1, 4096, 20_000, 300_000, SIZE])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_bytes_arrive_whatever_the_size(host, mode, nbytes) -> None:
    here, there = host(checksum=mode), host()
    here.memory[:] = random.Random(nbytes).randbytes(SIZE)
    assert here.run(WRITE, there.segment(), nbytes) == DONE
    assert there.memory[:nbytes] == here.memory[:nbytes]
    assert not any(there.memory[nbytes:])
    there.memory[:] = random.Random(nbytes + 1).randbytes(SIZE)
    before = bytes(here.memory[nbytes:])
    assert here.run(READ, there.segment(), nbytes) == DONE
    assert here.memory[:nbytes] == there.memory[:nbytes]
    assert here.memory[nbytes:] == before


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_without_checksums_the_serving_end_buffers_little(host, opcode) -> None:
    buffered = {}
    for mode in ("on", "off"):
        here, there = host(checksum=mode), host()
        assert here.run(opcode, there.segment(), 300_000) == DONE
        buffered[mode] = there.acceptor.streams[0].sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert buffered["off"] < buffered["on"]


@pytest.mark.parametrize("nbytes", [4096, 600_000])
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_flipped_bit_fails_the_chain_and_not_the_server(host, opcode, nbytes) -> None:
    here, there = host(checksum="on"), host()
    wrong = "back" if opcode is READ else "there"
    target = handshake.HELLO_BYTES + 1000  # well inside the payload, past headers and handshake

    def flip(direction: str, offset: int, data: bytes) -> bytes:
        if direction == wrong and offset <= target < offset + len(data):
            changed = bytearray(data)
            changed[target - offset] ^= 1
            return bytes(changed)
        return data

    with Proxy(there.port, flip) as proxy:
        chain = here.chain(opcode, there.segment(proxy.port), nbytes)
        assert here.tcp.run(chain, PATH) == BAD_CHECKSUM
        assert BAD_CHECKSUM.reason.is_path_failure
        assert here.tcp.endpoints == 0
        assert (chain.fence != 0) is (opcode is WRITE)
        assert here.run(opcode, there.segment(), nbytes) == DONE
        here.tcp.close()


@pytest.mark.parametrize("nbytes", [4096, 600_000])
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_chain_may_go_without_checksum_between_others(host, opcode, nbytes) -> None:
    here, there = host(checksum="on"), host()
    source, target = (there, here) if opcode is READ else (here, there)
    for number, bare in enumerate((False, True, False, True)):
        source.memory[:] = random.Random(number).randbytes(SIZE)
        chain = here.chain(opcode, there.segment(), nbytes)
        chain.checksum = not bare
        assert here.tcp.run(chain, PATH) == DONE
        assert target.memory[:nbytes] == source.memory[:nbytes]
    assert here.tcp.endpoints == 1


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_whoever_wants_no_checksum_gets_the_bytes_as_they_come(host, opcode) -> None:
    here, there = host(checksum="on"), host()
    source, into = (there, here) if opcode is READ else (here, there)
    source.memory[:] = random.Random(1).randbytes(SIZE)
    wrong, at = "back" if opcode is READ else "there", handshake.HELLO_BYTES + 1000

    def flip(direction: str, offset: int, data: bytes) -> bytes:
        if direction == wrong and offset <= at < offset + len(data):
            data = data[: at - offset] + bytes([data[at - offset] ^ 1]) + data[at - offset + 1 :]
        return data

    with Proxy(there.port, flip) as proxy:
        chain = here.chain(opcode, there.segment(proxy.port), 600_000)
        chain.checksum = False
        assert here.tcp.run(chain, PATH) == DONE
        assert sum(one != other for one, other in zip(source.memory, into.memory[:600_000], strict=False)) == 1
        here.tcp.close()


def test_a_header_changed_on_the_way_fails_too(host) -> None:
    """The checksum covers the descriptors: bytes of another place do not pass as the requested ones."""
    here, there = host(checksum="on"), host()
    there.memory[:] = random.Random(1).randbytes(SIZE)
    offset_field = handshake.HELLO_BYTES + wire.FRAME_HEADER_BYTES + 16

    def move(direction: str, offset: int, data: bytes) -> bytes:
        at = offset_field + 7 - offset
        if direction == "there" and 0 <= at < len(data):
            data = data[:at] + b"\x08" + data[at + 1 :]
        return data

    with Proxy(there.port, move) as proxy:
        assert here.run(READ, there.segment(proxy.port), 4096) == BAD_CHECKSUM
        here.tcp.close()


def test_refused_ranges_keep_a_checked_link_in_step(host) -> None:
    here, there = host(checksum="on"), host()
    here.memory[:] = random.Random(2).randbytes(SIZE)
    key, remote = here.region.key, there.segment()
    lengths = [100_000, 150_000, 300_000, 5, 70_000, 90_000]
    for opcode in (WRITE, READ, WRITE, READ):
        slices, at = [], 0
        for index, length in enumerate(lengths):
            region = bytes(16) if index % 2 else there.region.key
            slices.append(Slice(index, key, at, region, at, length))
            at += length
        plan, give_up = ChainPlan(remote, opcode, slices, at), time.monotonic() + GENEROUS_S
        chain = Chain(plan, {key: here.region}, give_up, lambda *_: None)
        outcome = here.tcp.run(chain, PATH)
        assert (outcome.status, outcome.refusals) == (TransferStatus.COMPLETED, bytes([0, 1] * 3))
    for index, part in enumerate(slices):
        end = part.local_offset + part.length
        moved = there.memory[part.local_offset : end] == here.memory[part.local_offset : end]
        assert moved is (index % 2 == 0)
    assert len(there.acceptor.hellos) == 1


# --- connections and their fates ---


def test_an_idle_connection_the_peer_closed_is_silently_replaced(host) -> None:
    here, there = host(), host()
    for opcode in (WRITE, READ):
        assert here.run(opcode, there.segment()) == DONE
        first = there.acceptor.hellos[-1].connection_id
        cut_links(there.acceptor)
        assert here.run(opcode, there.segment()) == DONE
        assert there.acceptor.hellos[-1].replaces == first
    assert here.meter.stats.retries == 2


def test_a_fresh_connection_that_breaks_is_not_repeated_here(host) -> None:
    here, there = host(), host()
    tries: list[int] = []

    def cut(direction: str, offset: int, data: bytes) -> bytes | None:
        if direction == "there" and offset >= handshake.HELLO_BYTES:
            tries.append(offset)
            return None
        return data

    with Proxy(there.port, cut) as proxy:
        chain = here.chain(WRITE, there.segment(proxy.port), 4096)
        assert here.tcp.run(chain, PATH) == LOST
        assert len(tries) == 1
    # The dispatcher takes the chain to another path, whose link first ends the first link at the peer.
    failed = chain.fence
    assert failed == there.acceptor.hellos[-1].connection_id
    other = here.chain(WRITE, there.segment(), 4096)
    other.fence = failed
    assert here.tcp.run(other, PATH) == DONE
    assert (there.acceptor.hellos[-1].replaces, other.fence) == (failed, 0)


def test_a_fenced_chain_takes_no_pooled_connection(host) -> None:
    here, there = host(), host()
    assert here.run(WRITE, there.segment()) == DONE
    pooled = there.acceptor.hellos[-1].connection_id
    chain = here.chain(WRITE, there.segment(), 4096)
    chain.fence = pooled
    assert here.tcp.run(chain, PATH) == DONE
    assert [one.replaces for one in there.acceptor.hellos] == [0, pooled]
    eventually(lambda: there.acceptor.links == 1, "the replaced link ended")
    assert here.run(WRITE, there.segment()) == DONE


def test_an_interrupted_chain_ends_at_once_and_is_not_repeated(host) -> None:
    here = host(TransferLimits(stall_s=1000.0, connect_s=1000.0))
    with Silent() as silent:
        chain = here.chain(WRITE, silent.segment, 4096, timeout_s=1000.0)
        outcomes: list[ChainOutcome] = []
        runner = threading.Thread(target=lambda: outcomes.append(here.tcp.run(chain, PATH)))
        runner.start()
        assert silent.got_frame.wait(GENEROUS_S)
        chain.interrupt()
        runner.join(GENEROUS_S)
        assert outcomes == [LOST]
        assert len(silent.links) == 1
        assert here.tcp.endpoints == 0


def test_endpoints_over_the_cap_are_evicted(host) -> None:
    here = host(replace(PATIENT, max_endpoints=2))
    peers = [host() for _ in range(4)]
    for _ in range(2):
        for peer in peers:
            assert here.run(WRITE, peer.segment()) == DONE
            assert here.tcp.endpoints <= 2
    eventually(lambda: sum(peer.acceptor.links for peer in peers) == 2, "evicted links ended")


def test_probe_forget_maintain(host) -> None:
    here, there = host(), host()
    segment = there.segment()
    deadline = time.monotonic() + GENEROUS_S
    assert here.tcp.probe(segment, PATH, deadline)
    assert here.tcp.endpoints == 1
    assert here.run(READ, segment) == DONE
    assert len(there.acceptor.hellos) == 1  # the probe's connection was used
    for _ in range(PATIENT.connections_per_peer + 2):
        assert here.tcp.probe(segment, PATH, deadline)
    assert here.tcp.endpoints <= PATIENT.connections_per_peer
    here.tcp.forget(segment, PATH)
    assert here.tcp.endpoints == 0
    assert here.tcp.probe(segment, PATH, deadline)
    here.tcp.maintain(time.monotonic())
    assert here.tcp.endpoints == 1
    here.tcp.maintain(time.monotonic() + PATIENT.idle_s + 1.0)
    assert here.tcp.endpoints == 0
    stale = SegmentDescriptor("127.0.0.1", there.port, bytes(16), segment.regions)
    assert not here.tcp.probe(stale, PATH, deadline)
    there.acceptor.close()
    assert not here.tcp.probe(segment, PATH, deadline)
    assert here.tcp.endpoints == 0


def test_a_closed_transport_runs_nothing(host) -> None:
    here, there = host(), host()
    assert here.run(READ, there.segment()) == DONE
    here.tcp.close()
    assert here.run(READ, there.segment()) == ChainOutcome(TransferStatus.CANCELLED, Reason.SHUTDOWN)
    assert here.tcp.endpoints == 0


def test_the_local_nic_is_the_source_the_remote_one_the_target(host) -> None:
    nics = {name: Nic(name, "tcp", f"127.0.1.{n}", 0, "127.0.1.0/24") for n, name in enumerate(("eth7", "eth8"), 1)}
    here, there = host(nics=nics), host()
    port = there.acceptor.listen("127.0.2.1", 0)
    segment = there.segment()
    segment = SegmentDescriptor(
        segment.host, segment.port, segment.boot_id, segment.regions, (Nic("far", "tcp", "127.0.2.1", port),)
    )
    for local in ("eth7", "eth8", ""):
        chain = here.chain(WRITE, segment, 4096)
        assert here.tcp.run(chain, Path("tcp", local, "far")) == DONE
    assert there.acceptor.sources[:2] == ["127.0.1.1", "127.0.1.2"]
    assert here.tcp.endpoints == 3


def test_inbound_links_over_the_cap_evict_resting_ones_only(host) -> None:
    there = host(replace(PATIENT, max_inbound=2))
    first, second, third = host(), host(), host()
    assert first.run(WRITE, there.segment()) == DONE
    with raw_link(there.segment()) as busy:
        frame = wire.Frame(WRITE, 1, 1, 200_000)
        busy.sendall(wire.pack_frame(frame, [(there.region.key, 0, 200_000)]) + b"x" * 10)
        eventually(lambda: users(there.table, there.region) == 1, "the frame is being served")
        assert second.run(WRITE, there.segment()) == DONE  # evicts the first link, which is idle
        eventually(lambda: there.acceptor.links == 2, "one was evicted")
        with raw_link(there.segment(), 2) as other:  # evicts the second link
            other.sendall(wire.pack_frame(frame, [(there.region.key, 0, 200_000)]) + b"x" * 10)
            eventually(lambda: users(there.table, there.region) == 2, "both frames are being served")
            assert third.run(WRITE, there.segment()) == ChainOutcome(TransferStatus.FAILED, Reason.BUSY)
            for sock in (busy, other):
                sock.sendall(b"y" * 199_990)
                reply = sock.recv(wire.FRAME_HEADER_BYTES, socket.MSG_WAITALL)
                assert wire.parse_reply(reply, frame)[0] == wire.ALL_OK
    assert first.run(WRITE, there.segment()) == DONE


def test_one_more_link_closes_the_one_that_has_rested_longest(host) -> None:
    there = host(replace(PATIENT, max_inbound=2))
    first, second, third = host(), host(), host()
    for each in (first, second, first):
        assert each.run(WRITE, there.segment()) == DONE
        time.sleep(0.2)  # its link becomes idle
    for each in (third, first, second):
        assert each.run(WRITE, there.segment()) == DONE
    assert [each.meter.stats.retries for each in (first, second)] == [0, 1]


def test_a_link_that_is_refused_evicts_no_other(host) -> None:
    there = host(replace(PATIENT, max_inbound=1))
    with raw_link(there.segment()) as resting:
        links = there.acceptor._by_identity
        eventually(lambda: any(link.resting for link in links.values()), "the link rests, so that it may be evicted")
        with raw_link(there.segment(), code=handshake.HelloCode.BUSY):  # its id is the resting link's
            frame = wire.Frame(READ, 1, 1, 100)
            resting.sendall(wire.pack_frame(frame, [(there.region.key, 0, 100)]))
            reply = resting.recv(wire.FRAME_HEADER_BYTES, socket.MSG_WAITALL)
            assert wire.parse_reply(reply, frame)[0] == wire.ALL_OK


# --- polling ---


@pytest.fixture
def no_core_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the core: simulated time needs no yield, and on a busy machine each yield costs milliseconds."""
    monkeypatch.setattr(spinner, "_yield", lambda: 0)


SIMULATED = pytest.mark.usefixtures("no_core_is_given_away")


class Waits:
    """A link in simulated time."""

    def __init__(self, come_s: float, look_s: float = 5e-6) -> None:
        self.come_s = come_s
        """The seconds until bytes come."""
        self.look_s = look_s
        """The seconds that a look at the socket takes."""
        self.now = self._since = 0.0
        self.seats = deque([None])
        self.spinner = Spinner(self, 100e-6, lambda: self.now, self.seats)

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int) -> int:
        self.now += self.look_s
        if self.now - self._since < self.come_s:
            raise BlockingIOError
        return len(buffer)

    def polled(self, waits: int) -> int:
        """Returns how many of ``waits`` waits began with polling."""
        polled = 0
        for _ in range(waits):
            self._since = self.now
            moved = self.spinner.poll(memoryview(bytearray(1)))
            polled += self.now > self._since
            if moved is None:
                self.now = max(self.now, self._since + self.come_s)
        assert list(self.seats) == [None]
        return polled


@SIMULATED
def test_links_poll_for_what_comes_soon_and_rest_now_and_then() -> None:
    waits = Waits(come_s=20e-6)
    assert waits.polled(128) == 128
    assert waits.polled(1) == 0  # the link rests, so that it may be evicted
    assert waits.polled(1290) == 1280
    waits.seats.clear()  # as many threads poll as are allowed
    assert waits.spinner.poll(memoryview(bytearray(1))) is None


@SIMULATED
def test_a_pause_among_many_requests_does_not_end_polling() -> None:
    waits = Waits(come_s=20e-6)
    for _ in range(20):
        waits.come_s = 60.0
        waits.polled(1)
        waits.come_s = 20e-6
        assert waits.polled(100) >= 97


@pytest.mark.parametrize(
    ("come_s", "look_s", "most"), [(60.0, 5e-6, 20), (20e-6, 3e-3, 2)], ids=["idle", "cores are short"]
)
@SIMULATED
def test_links_sleep_where_polling_gains_nothing(come_s, look_s, most) -> None:
    waits = Waits(come_s, look_s)
    waits.polled(100)
    assert waits.polled(1000) <= most


@SIMULATED
def test_short_waits_among_long_ones_are_polled_for() -> None:
    waits = Waits(come_s=20e-6)
    in_time = 0
    for turn in range(1000):
        waits.come_s = 300e-6 if turn % 2 else 20e-6
        in_time += waits.polled(1) and not turn % 2
    assert in_time > 100


@SIMULATED
def test_little_of_the_time_is_lost_to_others_that_want_the_core() -> None:
    """The core goes to other threads for 25 ms of each 100 ms that a poller would use, as with a quota."""
    waits = Waits(come_s=20e-6)
    used_s = lost_s = 0.0
    while waits.now < 15.0:
        before_s = waits.now
        waits.look_s = 5e-6 if used_s < 0.075 else 25e-3
        polled = waits.polled(1)
        if polled and waits.look_s > 1e-3:
            lost_s, used_s = lost_s + 25e-3, 0.0
        elif polled:
            used_s += waits.now - before_s
    assert 0.0 < lost_s / waits.now <= 0.06


@SIMULATED
def test_a_link_finds_out_that_times_have_changed() -> None:
    waits = Waits(come_s=60.0)
    waits.polled(5000)
    waits.come_s = 20e-6
    waits.polled(66)
    assert waits.polled(1000) > 990
    waits.look_s = 3e-3
    waits.polled(5000)
    assert waits.polled(1000) < 2
    waits.look_s = 5e-6
    waits.polled(3001)  # for twenty times as long as the core was lost
    assert waits.polled(1000) > 990
    waits.look_s = 3600.0  # the thread was stopped
    waits.polled(1)
    waits.look_s = 5e-6
    waits.polled(50_001)  # one second
    assert waits.polled(1000) > 990


def test_polling_can_be_off() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.send(b"x")
        assert Spinner(near, 0.0).poll(memoryview(bytearray(1))) is None


# --- hostile bytes ---


@pytest.fixture(scope="module")
def target() -> Iterator[Host]:
    one = Host(size=FUZZED)
    one.closed_region = one.table.register(bytearray(64), "cpu:0", Access.NONE)
    yield one
    one.close()


frames = st.builds(
    lambda opcode, frame_id, ranges, payload, with_checksum, lie: (
        wire.Frame(opcode, len(ranges), frame_id, (payload if lie else sum(r[2] for r in ranges)), with_checksum),
        ranges,
    ),
    st.sampled_from([READ, WRITE]),
    st.integers(0, 2**64 - 1),
    st.lists(
        st.tuples(
            st.sampled_from([b"GOOD", b"CLOSED", b"UNKNOWN"]),
            st.one_of(st.integers(0, FUZZED), st.integers(2**62, 2**64 - 1)),
            st.integers(0, 2000),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
)


@settings(max_examples=usually(40, long=100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shots=st.lists(st.one_of(st.binary(min_size=1, max_size=200), frames), min_size=1, max_size=4),
    mutations=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 255)), max_size=2),
)
def test_no_bytes_reach_memory_outside_granted_ranges(target, shots, mutations) -> None:
    """Bytes change only where a frame, mutated or not, names the region's key and a range of it.

    The link ends or goes on, and the server goes on, whatever a peer sends."""
    keys = {b"GOOD": target.region.key, b"CLOSED": target.closed_region.key, b"UNKNOWN": b"u" * 16}
    data = b""
    for shot in shots:
        if isinstance(shot, bytes):
            data += shot
            continue
        frame, ranges = shot
        head = wire.pack_frame(frame, [(keys[key], offset, length) for key, offset, length in ranges])
        data += head
        if frame.opcode == WRITE:
            payload = b"\xff" * min(frame.payload, 10_000)
            data += payload
            if frame.checksum:
                data += wire.pack_trailer(checksum([memoryview(payload)], seed_of(head)))
    noisy = bytearray(data)
    for place, change in mutations:
        if place < len(noisy):
            noisy[place] ^= change
    allowed = _writable(bytes(noisy), target.region.key)
    target.memory[:] = bytes(FUZZED)
    with raw_link(target.segment()) as sock, contextlib.suppress(OSError):
        sock.sendall(noisy)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    eventually(lambda: target.acceptor.links == 0, "the link ended")
    changed = {place for place, byte in enumerate(target.memory) if byte} if any(target.memory) else set()
    assert changed <= allowed
    assert not any(target.closed_region.view)


def _writable(data: bytes, key: bytes) -> set[int]:
    """Returns every place that any descriptor with this key anywhere in the bytes could name."""
    places: set[int] = set()
    at = data.find(key)
    while at >= 0:
        if len(data) >= at + wire.DESCRIPTOR_BYTES:
            offset, length = struct.unpack_from("!QQ", data, at + 16)
            if offset + length <= FUZZED:
                places |= set(range(offset, offset + length))
        at = data.find(key, at + 1)
    return places


@pytest.mark.parametrize(
    "noise",
    [
        random.Random(1).randbytes(4096),
        wire.pack_frame(wire.Frame(READ, 1, 1, 10), [(bytes(16), 0, 10)]) + b"more than a READ",
        wire.pack_frame(wire.Frame(WRITE, 1, 1, 4), [(bytes(16), 0, 4)]) + b"four and more",
    ],
    ids=["random", "bytes after a READ", "bytes after a WRITE"],
)
def test_nonsense_is_counted_and_ends_the_link(host, noise) -> None:
    here, there = host(), host()
    with raw_link(there.segment()) as sock:
        sock.sendall(noise)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
    eventually(lambda: there.meter.stats.protocol_errors == 1, "counted")
    assert here.run(WRITE, there.segment()) == DONE
