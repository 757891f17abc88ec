"""The shm transport between two processes: data, refusals, memory that is reused, peers that die, freeze and lie."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from pinyon.transfer import Access, Opcode, Reason, Region, SegmentDescriptor, TransferLimits, TransferStatus
from pinyon.transfer.chains.chain import DONE, NO_ROOM, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.links.acceptor import Acceptor, InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link, dial
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports import control
from pinyon.transfer.transports.shm import cma
from pinyon.transfer.transports.shm import wire as shm_wire
from pinyon.transfer.transports.shm.cma import shm_available
from pinyon.transfer.transports.shm.transport import ShmTransport
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.spans import Spans
from tests.unit.transfer.conftest import GENEROUS_S, PATIENT, Peer, all_closed, eventually, open_files
from tests.unit.transfer.shm_peer import BAD, GOOD

pytestmark = pytest.mark.skipif(shm_available() is not None, reason=str(shm_available()))

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 4 << 20
SHM = Path("shm", "", "")
LIMITS = replace(PATIENT, connections_per_peer=2)


class ShmPeer(Peer):
    """The peer of ``shm_peer.py`` in a process of its own."""

    module = "tests.unit.transfer.shm_peer"

    def answer(self):
        return json.loads(self._process.stdout.readline())

    def send(self, *command: object) -> None:
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, *command: object):
        self.send(*command)
        return self.answer()

    def peek(self, start: int, end: int) -> bytes:
        return bytes.fromhex(self.ask("peek", start, end))


@pytest.fixture
def start_peer() -> Iterator[Callable[..., ShmPeer]]:
    def start(size: int = SIZE, secret: str = "", under: Sequence[str] = ()) -> ShmPeer:
        return ShmPeer(size, secret, under)

    yield from all_closed(start)


class StepClock:
    """The monotonic clock, which a copy reads before each piece; the test can act at one of these readings."""

    def __init__(self) -> None:
        self._then: Callable[[], object] | None = None
        self.left = 0
        """The number of readings until then."""

    def at(self, reading: int, then: Callable[[], object]) -> None:
        """Calls ``then`` at the ``reading``-th reading from now."""
        self.left, self._then = reading, then

    def __call__(self) -> float:
        if self._then is not None:
            self.left -= 1
            if not self.left:
                then, self._then = self._then, None
                then()
        return time.monotonic()


class Near:
    """The near side in this process: a transport and a local region."""

    def __init__(self, limits: TransferLimits = LIMITS, secret: bytes | None = None, size: int = SIZE) -> None:
        self.clock = StepClock()
        self.table = MemoryTable()
        self.context = EngineContext(os.urandom(16), self.table, limits, secret, clock=self.clock)
        self.meter = self.context.meter
        self.transport = ShmTransport(self.context)
        self.memory = bytearray(size)
        self.region = self.table.register(self.memory, "cpu:0", Access.NONE)
        self.ended: list[ChainOutcome] = []
        self.marks: list[array[int]] = []
        """The marks of links that the test itself initiates."""

    def chain(
        self,
        opcode: Opcode,
        segment: SegmentDescriptor,
        parts: list[tuple[int, bytes, int, int]],
        timeout_s: float = 60.0,
    ) -> Chain:
        """Returns a chain; ``parts`` are ``(local offset, remote key, remote offset, length)``."""
        slices = [Slice(index, self.region.key, *part) for index, part in enumerate(parts)]
        plan = ChainPlan(segment, opcode, slices, sum(part[3] for part in parts))
        deadline = time.monotonic() + timeout_s
        return Chain(plan, {self.region.key: self.region}, deadline, lambda _, outcome: self.ended.append(outcome))

    def run(self, opcode: Opcode, segment: SegmentDescriptor, parts: list[tuple[int, bytes, int, int]]) -> ChainOutcome:
        return self.transport.run(self.chain(opcode, segment, parts), SHM)

    def move(self, segment: SegmentDescriptor, key: bytes, length: int) -> ChainOutcome | None:
        """READs to the start of the region by the short way; None: there is no endpoint, or it does not know how."""
        endpoint = self.transport.lend((segment.peer, SHM))
        if endpoint is None:
            return None
        try:
            return endpoint.move(READ, self.region, 0, key, 0, length, time.monotonic() + 60.0)
        finally:
            self.transport.release(endpoint)

    def close(self) -> None:
        self.transport.close()


@pytest.fixture
def make_near(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Near]]:
    def make(piece_bytes: int = cma.PIECE_BYTES, **arguments: object) -> Near:
        monkeypatch.setattr(cma, "PIECE_BYTES", piece_bytes)
        return Near(**arguments)

    yield from all_closed(make)


@pytest.fixture
def near(make_near) -> Near:
    return make_near()


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


# --- data ---


def test_random_batches_match_byte_arrays(make_near, start_peer, rng) -> None:
    size = 1 << 20
    near, peer = make_near(size=size), start_peer(size)
    here, there = bytearray(rng.randbytes(size)), bytearray(rng.randbytes(size))
    near.memory[:] = here
    assert near.run(WRITE, peer.segment, [(0, peer.key, 0, size)]) == DONE
    assert peer.peek(0, size) == here
    peer.ask("poke", 0, there.hex())
    for opcode in [READ, WRITE] * 15:
        parts = []
        cell = rng.choice([16, 300, 1024])
        for place in rng.sample(range(size // cell), rng.choice([1, 3, 8, 9, 1000])):
            # The written parts are disjoint, so that their order does not matter; the read parts may overlap.
            written, length = place * cell, rng.choice([cell, rng.randint(1, cell)])
            read = rng.randrange(size - length)
            local, remote = (written, read) if opcode is READ else (read, written)
            parts.append((local, peer.key, remote, length))
            if opcode is READ:
                here[local : local + length] = there[remote : remote + length]
            else:
                there[remote : remote + length] = here[local : local + length]
        if rng.random() < 0.3:
            parts.sort()  # neighbours come after one another
        assert near.run(opcode, peer.segment, parts) == DONE
        assert near.memory == here
        assert peer.peek(0, size) == there
    assert near.transport.endpoints == 1
    assert near.meter.stats.retries == 0


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("length", [8, 100_000])
def test_a_refused_slice_costs_only_itself(near, start_peer, opcode, length) -> None:
    peer = start_peer(4 * length)
    closed, read_only = (
        bytes.fromhex(peer.ask("register", length, int(access))) for access in (Access.NONE, Access.READ)
    )
    near.memory[:] = b"\x77" * SIZE
    parts = [
        (0, peer.key, 0, length),
        (1 * length, b"no such key here", 0, length),
        (2 * length, peer.key, 3 * length + 1, length),
        (3 * length, closed, 0, length),
        (4 * length, read_only, 0, length),
        (5 * length, peer.key, 1 << 62, length),
        (6 * length, peer.key, 3 * length, length),
    ]
    outcome = near.run(opcode, peer.segment, parts)
    denied = Reason.ACCESS_DENIED
    codes = [0, Reason.UNKNOWN_REGION, Reason.OUT_OF_RANGE, denied, denied, Reason.OUT_OF_RANGE, 0]
    if opcode is READ:
        codes[4] = 0
    assert outcome == ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, bytes(codes))
    untouched = b"\x77" * length
    if opcode is READ:
        expected = [b"\x5a" * length, *[untouched] * 3, b"\x33" * length, untouched, b"\x5a" * length]
        assert near.memory[: 7 * length] == b"".join(expected)
        assert near.memory[7 * length :] == b"\x77" * (SIZE - 7 * length)
    else:
        assert peer.peek(0, 4 * length) == b"".join([untouched, b"\x5a" * (2 * length), untouched])
        assert near.run(READ, peer.segment, [(0, read_only, 0, length)]) == DONE
        assert near.memory[:length] == b"\x33" * length
    all_refused = near.run(opcode, peer.segment, [parts[1], parts[3]])
    assert all_refused.refusals == bytes([Reason.UNKNOWN_REGION, denied])


@pytest.mark.parametrize("length", [8, 100_000])
def test_reading_a_region_that_was_unregistered(near, start_peer, length) -> None:
    peer = start_peer()
    other = bytes.fromhex(peer.ask("register", length, int(Access.READ)))
    parts = [(0, peer.key, 0, length), (length, other, 0, length)]
    assert near.run(READ, peer.segment, parts) == DONE
    peer.ask("unregister", other.hex())
    near.memory[:] = bytes(SIZE)
    outcome = near.run(READ, peer.segment, parts)
    assert outcome.refusals == bytes([0, Reason.UNKNOWN_REGION])
    assert near.memory == b"\x5a" * length + bytes(SIZE - length)
    assert near.run(READ, peer.segment, parts[1:]).refusals == bytes([Reason.UNKNOWN_REGION])


@pytest.mark.parametrize(("length", "alone"), [(4096, False), (1 << 20, False), (4096, True)])
def test_no_completed_read_has_what_came_after_unregister(near, start_peer, length, alone) -> None:
    """Completed READs have no bytes that were written after the unregistration; ``alone`` READs use no chain.

    The endpoint of an ``alone`` READ knows the key. The test runs at least 300 rounds, until enough READs came in time
    and enough too late."""
    peer = start_peer()
    peer.send("reuse", length)
    completed = refused = alone_completed = 0
    rounds = itertools.count(1)
    stopping = False
    give_up = time.monotonic() + 4 * GENEROUS_S
    good = bytes([GOOD]) * length
    latest, seen = [bytes.fromhex(peer.answer())], [0]

    def follow() -> None:
        while key := peer.answer():
            latest[0] = bytes.fromhex(key)
            seen[0] = next(rounds)

    follower = threading.Thread(target=follow)
    follower.start()
    while follower.is_alive():
        outcome = near.move(peer.segment, latest[0], length) if alone else None
        alone_completed += outcome is not None
        outcome = outcome or near.run(READ, peer.segment, [(0, latest[0], 0, length)])
        assert outcome.status is TransferStatus.COMPLETED
        if outcome.refusals is None:
            completed += 1
            assert BAD not in near.memory[:length]
            assert near.memory[:length] == good
        else:
            refused += 1
            assert outcome.refusals == bytes([Reason.UNKNOWN_REGION])
        enough = min(completed, refused) > 10 and (not alone or alone_completed > 10) and seen[0] >= 300
        if not stopping and (enough or time.monotonic() > give_up):
            stopping = True
            peer.send("enough")
    follower.join()
    print(f"{completed} completed, {alone_completed} alone, {refused} refused")
    assert completed > 10
    assert not alone or alone_completed > 10
    assert refused > 10


def test_a_read_of_a_region_unregistered_meanwhile_is_refused(make_near, start_peer) -> None:
    near, peer = make_near(piece_bytes=50_000), start_peer()
    other = bytes.fromhex(peer.ask("register", 100_000, int(Access.READ)))
    parts = [(0, peer.key, 0, 100_000), (100_000, other, 0, 100_000)]
    assert near.run(READ, peer.segment, parts) == DONE  # from now on the initiator knows where the regions lie
    chain = near.chain(READ, peer.segment, parts)
    near.clock.at(4, lambda: peer.ask("unregister", other.hex()))  # before the last of four pieces
    assert near.transport.run(chain, SHM).refusals == bytes([0, Reason.UNKNOWN_REGION])


# --- peers that die, freeze or are not there ---


def test_a_killed_peer(near, start_peer) -> None:
    peer = start_peer()
    assert near.run(READ, peer.segment, [(0, peer.key, 0, 8)]) == DONE
    peer.kill()
    for opcode in (READ, WRITE, READ):
        outcome = near.run(opcode, peer.segment, [(0, peer.key, 0, 8)])
        assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
    assert near.transport.endpoints == 0
    assert not near.transport.probe(peer.segment, SHM, time.monotonic() + GENEROUS_S)


def test_kills_at_random_points(make_near, start_peer, rng) -> None:
    near = make_near(piece_bytes=64 << 10)
    for opcode in [READ, WRITE] * 5:
        peer = start_peer()
        near.memory[:] = bytes(SIZE) if opcode is READ else b"\x77" * SIZE
        wanted = b"\x5a" * SIZE if opcode is READ else b"\x77" * SIZE
        assert near.run(READ, peer.segment, [(0, peer.key, 0, 8)]) == DONE
        near.memory[:8] = wanted[:8] if opcode is WRITE else bytes(8)
        killer = threading.Timer(rng.random() * 0.02, peer.kill)
        killer.start()
        outcomes = []
        while not outcomes or outcomes[-1] == DONE:
            outcomes.append(near.run(opcode, peer.segment, [(0, peer.key, 0, SIZE)]))
            if opcode is READ and outcomes[-1] == DONE:
                assert near.memory == wanted
                near.memory[:] = bytes(SIZE)
        killer.join()
        assert outcomes[-1].status is TransferStatus.FAILED
        assert outcomes[-1].reason in (Reason.CONNECTION_LOST, Reason.CONNECT_FAILED)
    assert near.transport.endpoints == 0


def test_a_frozen_peer_can_be_read(near, start_peer) -> None:
    peer = start_peer()
    assert near.run(READ, peer.segment, [(0, peer.key, 0, 8)]) == DONE
    peer.freeze()
    for length in (8, SIZE):
        assert near.run(READ, peer.segment, [(0, peer.key, 0, length)]) == DONE
    assert near.memory == b"\x5a" * SIZE


def test_a_frozen_peer_stalls_a_write_and_never_does_it_later(make_near, start_peer) -> None:
    near, peer = make_near(limits=replace(LIMITS, stall_s=1.0)), start_peer()
    assert near.run(WRITE, peer.segment, [(0, peer.key, 0, 8)]) == DONE
    peer.freeze()
    near.memory[:] = b"\x77" * SIZE
    chain = near.chain(WRITE, peer.segment, [(0, peer.key, 0, SIZE)])
    assert near.transport.run(chain, SHM) == ChainOutcome(TransferStatus.TIMEOUT, Reason.STALLED)
    assert chain.fence
    peer.thaw()
    eventually(lambda: peer.ask("state")[0] == 0, "the link is gone")
    assert peer.peek(0, SIZE) == bytes(8) + b"\x5a" * (SIZE - 8)
    # The next attempt replaces that link; an idle endpoint does not suffice.
    assert near.transport.probe(peer.segment, SHM, time.monotonic() + GENEROUS_S)
    assert near.transport.run(chain, SHM) == DONE
    assert not chain.fence
    assert near.transport.endpoints == 2
    assert peer.peek(0, SIZE) == b"\x77" * SIZE


def test_the_deadline_ends_a_write_to_a_frozen_peer(make_near, start_peer) -> None:
    near = make_near(limits=PATIENT)
    peer = start_peer()
    assert near.run(WRITE, peer.segment, [(0, peer.key, 0, 8)]) == DONE
    peer.freeze()
    chain = near.chain(WRITE, peer.segment, [(0, peer.key, 0, 8)], timeout_s=0.3)
    assert near.transport.run(chain, SHM) == ChainOutcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
    fresh = near.chain(WRITE, peer.segment, [(0, peer.key, 0, 8)], timeout_s=0.3)
    assert near.transport.run(fresh, SHM) == ChainOutcome(TransferStatus.TIMEOUT, Reason.DEADLINE)


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_chain_is_stopped_or_interrupted(make_near, start_peer, opcode, interrupt) -> None:
    near, peer = make_near(piece_bytes=64 << 10), start_peer()
    assert near.run(READ, peer.segment, [(0, peer.key, 0, 8)]) == DONE
    chain = near.chain(opcode, peer.segment, [(0, peer.key, 0, SIZE)])
    cancelled = ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED)

    def stop() -> None:
        if interrupt:
            chain.interrupt()
        else:
            chain.stop(cancelled)

    if opcode is READ:
        near.clock.at(1, stop)  # noticed before the second piece
    else:
        peer.freeze()
        stopper = threading.Thread(
            target=lambda: (eventually(lambda: chain._running, "the WRITE has begun"), stop()), daemon=True
        )
        stopper.start()
    outcome = near.transport.run(chain, SHM)
    assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
    assert near.transport.endpoints == 0
    assert chain.stopped is not interrupt
    if opcode is READ:
        assert near.memory[: 64 << 10] == b"\x5a" * (64 << 10)
        assert near.memory[64 << 10 :] == bytes(SIZE - (64 << 10))  # nothing is written after run() has returned
    else:
        assert chain.fence
    chain.finish(outcome)
    assert near.ended == [outcome if interrupt else cancelled]


def test_a_chain_that_has_ended_is_left_alone(near, start_peer) -> None:
    peer = start_peer()
    chain = near.chain(READ, peer.segment, [(0, peer.key, 0, 8)])
    chain.stop(ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED))
    assert near.transport.run(chain, SHM).status is TransferStatus.CANCELLED
    assert near.memory[:8] == bytes(8)
    assert near.transport.endpoints == 1


def test_an_idle_link_that_the_peer_closed_is_replaced_silently(near, start_peer) -> None:
    peer = start_peer()
    for opcode, retries in ((WRITE, 1), (READ, 1)):  # a READ of a known place does not need the link
        assert near.run(opcode, peer.segment, [(0, peer.key, 0, 8)]) == DONE
        peer.ask("drop")
        assert near.run(opcode, peer.segment, [(0, peer.key, 0, 8)]) == DONE
        assert near.meter.stats.retries == retries
    assert near.transport.endpoints == 1


def test_a_peer_that_closed_its_engine_cannot_be_read(near, start_peer) -> None:
    peer = start_peer()
    assert near.run(READ, peer.segment, [(0, peer.key, 0, 8)]) == DONE
    peer.ask("close")
    outcome = near.run(READ, peer.segment, [(0, peer.key, 0, 8)])
    assert outcome.refusals == bytes([Reason.UNKNOWN_REGION])
    assert near.run(WRITE, peer.segment, [(0, peer.key, 0, 8)]) == DONE  # its acceptor is still there


def test_nobody_there(near, start_peer) -> None:
    segment = SegmentDescriptor("127.0.0.1", 1, os.urandom(16), shm="@pinyon-transfer-nobody")
    failed = ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
    assert near.run(READ, segment, [(0, b"k" * 16, 0, 8)]) == failed
    assert near.run(WRITE, replace(segment, shm=""), [(0, b"k" * 16, 0, 8)]) == failed
    stale = replace(start_peer().segment, boot_id=bytes(16))
    assert near.run(READ, stale, [(0, b"k" * 16, 0, 8)]) == ChainOutcome(TransferStatus.REFUSED, Reason.STALE_SEGMENT)


@pytest.mark.parametrize(("mine", "theirs"), [(b"right", "wrong"), (b"right", ""), (None, "right")])
def test_wrong_secrets(make_near, start_peer, mine, theirs) -> None:
    near, peer = make_near(secret=mine), start_peer(secret=theirs)
    outcome = near.run(READ, peer.segment, [(0, peer.key, 0, 8)])
    assert outcome == ChainOutcome(TransferStatus.REFUSED, Reason.UNAUTHENTICATED)
    assert near.memory[:8] == bytes(8)
    right = make_near(secret=theirs.encode() or None)
    assert right.run(READ, peer.segment, [(0, peer.key, 0, 8)]) == DONE


# --- memory that may not be read ---


def test_a_kernel_that_says_no_is_explained_once(near, start_peer, monkeypatch, caplog) -> None:
    peer = start_peer()

    def refuse(memory: object, seals: object) -> bool:
        raise PermissionError(errno.EPERM, "process_vm_readv")

    monkeypatch.setattr(cma.PeerMemory, "holds", refuse)
    with caplog.at_level(logging.INFO, "pinyon"):
        for opcode in (READ, WRITE):
            outcome = near.run(opcode, peer.segment, [(0, peer.key, 0, 8)])
            assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "ptrace_scope" in message
    assert "CAP_SYS_PTRACE" in message


def test_a_pid_of_another_namespace(near, start_peer, monkeypatch, caplog) -> None:
    peer = start_peer()
    monkeypatch.setattr(cma, "_peer_pid", lambda stream: 0)
    with caplog.at_level(logging.INFO, "pinyon"):
        outcome = near.run(READ, peer.segment, [(0, peer.key, 0, 8)])
    assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
    assert "pid namespace" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_peer_of_another_user_is_unreachable(near, start_peer, caplog) -> None:
    peer = start_peer()
    peer.ask("become", 65534)  # this process may read the peer's memory, but not the reverse
    with caplog.at_level(logging.INFO, "pinyon"):
        outcome = near.run(READ, peer.segment, [(0, peer.key, 0, 8)])
    assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
    assert "cannot read this process's memory" in caplog.text


_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode != 0,
    reason="cannot make a pid namespace",
)
def test_a_peer_in_another_pid_namespace_is_unreachable(near, start_peer) -> None:
    peer = start_peer(under=_UNSHARE)
    outcome = near.run(READ, peer.segment, [(0, peer.key, 0, 8)])
    assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)


class Impostor:
    """A server of this process's shm links that sends what it is told after the initiator's PROOF.

    An empty answer is a valid proof; with ``repeat`` later links get the first link's proof again."""

    def __init__(self, *answers: bytes, repeat: bool = False) -> None:
        self._answers = answers
        self._repeat = repeat
        self._marks: list[array[int]] = []

    def serve(self, inbound: InboundLink) -> None:
        deadline = time.monotonic() + GENEROUS_S
        inbound.stream.receive_bytes(shm_wire.PROOF_BYTES, deadline)
        self._marks.append(array("Q", inbound.marks.server))
        shown = self._marks[0 if self._repeat else -1].buffer_info()[0]
        inbound.stream.send([self._answers[0] or shm_wire.pack_proof(shm_wire.OK, shown)], deadline)
        for answer in self._answers[1:]:
            inbound.stream.receive_bytes(shm_wire.HEAD_BYTES + 16, deadline)
            inbound.stream.send([answer], deadline)


@pytest.fixture
def impostor() -> Iterator[Callable[..., SegmentDescriptor]]:
    acceptors: list[Acceptor] = []

    def start(*answers: bytes, repeat: bool = False) -> SegmentDescriptor:
        context = EngineContext(os.urandom(16), MemoryTable(), LIMITS)
        acceptors.append(Acceptor(context, {Service.SHM: Impostor(*answers, repeat=repeat)}))
        address = f"@pinyon-transfer-{context.boot_id.hex()}"
        acceptors[-1].listen_unix(address)
        return SegmentDescriptor("127.0.0.1", 1, context.boot_id, shm=address)

    yield start
    for acceptor in acceptors:
        acceptor.close()


def test_a_server_that_proves_nothing(near, impostor) -> None:
    lost, unreachable = Reason.CONNECT_FAILED, shm_wire.pack_proof(shm_wire.UNREACHABLE)
    elsewhere = shm_wire.pack_proof(shm_wire.OK, 4096)
    for proof, reason in ((unreachable, lost), (elsewhere, lost), (b"!" * shm_wire.PROOF_BYTES, Reason.PROTOCOL)):
        outcome = near.run(READ, impostor(proof), [(0, b"k" * 16, 0, 8)])
        assert outcome == ChainOutcome(TransferStatus.FAILED, reason)
    assert near.transport.endpoints == 0


def test_a_mark_of_another_link_proves_nothing(near, start_peer, impostor) -> None:
    """The mark that a process showed on an earlier link is no proof on the next link, for either end."""
    again = impostor(b"", repeat=True)
    deadline = time.monotonic() + GENEROUS_S
    assert near.transport.probe(again, SHM, deadline)
    assert not near.transport.probe(again, SHM, deadline)
    peer = start_peer()
    first = dial(near.context, peer.segment.shm, peer.segment.boot_id, Service.SHM, deadline)
    mark = array("Q", first.marks.initiator)
    codes = []
    for link in (first, dial(near.context, peer.segment.shm, peer.segment.boot_id, Service.SHM, deadline)):
        link.stream.send([shm_wire.pack_proof(shm_wire.OK, mark.buffer_info()[0])], deadline)
        codes.append(shm_wire.parse_proof(link.stream.receive_bytes(shm_wire.PROOF_BYTES, deadline))[0])
        link.stream.close(hard=True)
    assert codes == [shm_wire.OK, shm_wire.UNREACHABLE]


def test_a_server_that_lies_about_its_memory(near, impostor) -> None:
    proof = b""  # the peer is this process
    request = shm_wire.ShmRequestHead(shm_wire.RESOLVE, 0, 1, 1, 0)
    nowhere = shm_wire.ShmPlace(0, 4096, shm_wire.Seal(8192, b"s" * 16), Spans((0,), (1 << 20,)))
    not_sealed = nowhere._replace(address=near.region.address)
    for length in (8, 100_000):
        for place in (nowhere, not_sealed):
            answers = [shm_wire.pack_places(request._replace(id=number), [place]) for number in range(1, 10)]
            outcome = near.run(READ, impostor(proof, *answers), [(0, b"k" * 16, 0, length)])
            assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
    overlong = nowhere._replace(spans=Spans((0,), (1 << 63,)))
    for answer in (b"?" * 24, shm_wire.pack_places(request._replace(id=2), [nowhere]), overlong):
        data = answer if isinstance(answer, bytes) else shm_wire.pack_places(request, [answer])
        outcome = near.run(READ, impostor(proof, data), [(0, b"k" * 16, 0, 8)])
        assert outcome == ChainOutcome(TransferStatus.FAILED, Reason.PROTOCOL)


# --- the server against peers that lie ---


def dial_raw(near: Near, peer: ShmPeer) -> Link:
    """Returns a link after the proofs, whose initiator is the test itself."""
    deadline = time.monotonic() + GENEROUS_S
    link = dial(near.context, peer.segment.shm, peer.segment.boot_id, Service.SHM, deadline)
    mark = array("Q", link.marks.initiator)
    near.marks.append(mark)
    link.stream.send([shm_wire.pack_proof(shm_wire.OK, mark.buffer_info()[0])], deadline)
    assert shm_wire.parse_proof(link.stream.receive_bytes(shm_wire.PROOF_BYTES, deadline))[0] == shm_wire.OK
    return link


def test_noise_ends_the_link_and_nothing_else(near, start_peer, rng) -> None:
    peer = start_peer()
    valid = shm_wire.pack_write(1, [(peer.key, 0, 4)] * 3, [near.region.address] * 3, 12)
    surely_wrong = 0
    for number in range(60):
        link = dial_raw(near, peer)
        if number % 2:
            data = bytearray(valid)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            data = rng.randbytes(rng.randint(1, 200))
        surely_wrong += len(data) >= shm_wire.HEAD_BYTES and data[:2] != valid[:2]
        link.stream.send([bytes(data)], time.monotonic() + GENEROUS_S)
        link.stream.close(hard=False)
    eventually(lambda: peer.ask("state")[0] == 0, "all links have ended")
    assert peer.ask("state")[1] >= surely_wrong  # protocol errors
    near.memory[:8] = b"after it"
    assert near.run(WRITE, peer.segment, [(0, peer.key, 0, 8)]) == DONE
    assert peer.peek(0, 8) == b"after it"


def test_an_initiator_that_does_not_prove_itself_is_told(near, start_peer) -> None:
    peer = start_peer()
    deadline = time.monotonic() + GENEROUS_S
    other = array("Q", b"s" * 16)
    for address in (4096, other.buffer_info()[0]):
        link = dial(near.context, peer.segment.shm, peer.segment.boot_id, Service.SHM, deadline)
        link.stream.send([shm_wire.pack_proof(shm_wire.OK, address)], deadline)
        proof = link.stream.receive_bytes(shm_wire.PROOF_BYTES, deadline)
        assert shm_wire.parse_proof(proof)[0] == shm_wire.UNREACHABLE
        link.stream.close(hard=True)


def test_a_write_from_memory_that_is_not_there_ends_the_link(near, start_peer) -> None:
    peer = start_peer()
    deadline = time.monotonic() + GENEROUS_S
    link = dial_raw(near, peer)
    link.stream.send([shm_wire.pack_write(1, [(peer.key, 0, 8)], [4096], 8)], deadline)
    with pytest.raises(ConnectionResetError):
        link.stream.receive_bytes(1, deadline)
    link.stream.close(hard=True)
    assert peer.peek(0, 16) == b"\x5a" * 16


# --- the server in this process, where the test can look inside ---


class Local:
    """A served region in this process."""

    def __init__(self, limits: TransferLimits) -> None:
        self.table = MemoryTable()
        context = EngineContext(os.urandom(16), self.table, limits)
        self.meter = context.meter
        self.transport = ShmTransport(context)
        self.acceptor = Acceptor(context, {Service.SHM: self.transport.service})
        self.acceptor.listen_unix(self.transport.address)
        self.memory = bytearray(SIZE)
        self.region: Region = self.table.register(self.memory, "cpu:0", Access.READ_WRITE)
        self.segment = SegmentDescriptor("127.0.0.1", 1, context.boot_id, shm=self.transport.address)

    def close(self) -> None:
        self.transport.close()
        self.acceptor.close()


@pytest.fixture
def make_local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Local]]:
    def make(piece_bytes: int = cma.PIECE_BYTES) -> Local:
        monkeypatch.setattr(cma, "PIECE_BYTES", piece_bytes)
        return Local(LIMITS)

    yield from all_closed(make)


@pytest.fixture
def local(make_local) -> Local:
    return make_local()


def test_unregister_ends_a_write_in_mid_copy(near, make_local, monkeypatch) -> None:
    local = make_local(64 << 10)
    near.memory[:] = b"\x77" * SIZE
    copying, unregistering = threading.Event(), threading.Event()
    pieces = []

    really_open = control.LinkWatch.is_open

    def is_open(watch: control.LinkWatch) -> bool:
        pieces.append(1)
        if len(pieces) == 3:
            copying.set()
            assert unregistering.wait(GENEROUS_S)
            eventually(lambda: not really_open(watch), "aborted")
        return really_open(watch)

    monkeypatch.setattr(control.LinkWatch, "is_open", is_open)
    outcomes: list[ChainOutcome] = []
    chain = near.chain(WRITE, local.segment, [(0, local.region.key, 0, SIZE)])
    writer = threading.Thread(target=lambda: outcomes.append(near.transport.run(chain, SHM)))
    writer.start()
    assert copying.wait(GENEROUS_S)
    unregistering.set()
    local.table.unregister(local.region, 0.01)
    assert len(pieces) == 3
    after = bytes(local.memory)
    assert after == b"\x77" * (2 * 64 << 10) + bytes(SIZE - (2 * 64 << 10))
    writer.join(GENEROUS_S)
    assert outcomes == [ChainOutcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)]
    assert local.memory == after


def test_what_was_served_is_counted(near, local) -> None:
    parts = [(0, local.region.key, 0, 100), (0, b"no such key here", 0, 50)]
    near.run(WRITE, local.segment, parts)
    near.run(READ, local.segment, [(0, b"no such key here", 0, 50)])
    stats = local.meter.snapshot()
    assert (stats.served_written_bytes, stats.served_refusals) == (100, {"unknown_region": 2})


def test_many_threads_many_regions(make_near, local, rng) -> None:
    near = make_near(limits=replace(LIMITS, connections_per_peer=4))
    regions = [local.table.register(bytearray([number]) * 5000, "cpu:0", Access.READ) for number in range(1, 7)]
    seeds = [rng.randrange(1 << 32) for _ in range(4)]
    failures: list[object] = []

    def work(base: int, seed: int) -> None:
        own = random.Random(seed)
        for _ in range(100):
            picked = [own.choice(regions) for _ in range(own.choice([1, 5, 30]))]
            length = own.choice([10, 5000])
            parts = [(base + index * length, region.key, 0, length) for index, region in enumerate(picked)]
            outcome = near.run(READ, local.segment, parts)
            wanted = b"".join(bytes([region.array[0]]) * length for region in picked)
            if outcome != DONE or near.memory[base : base + len(wanted)] != wanted:
                failures.append(outcome)

    threads = [threading.Thread(target=work, args=(number * (SIZE // 4), seed)) for number, seed in enumerate(seeds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GENEROUS_S)
    assert not failures
    assert near.transport.endpoints <= 4


# --- endpoints ---


def test_endpoints_are_capped_probed_forgotten_and_expire(near, local) -> None:
    transport = near.transport
    deadline = time.monotonic() + GENEROUS_S
    parts = [(0, local.region.key, 0, 8)]
    held = [transport.lease(near.chain(READ, local.segment, parts), SHM) for _ in range(2)]
    assert transport.run(near.chain(READ, local.segment, parts, timeout_s=0.01), SHM) is NO_ROOM
    assert transport.probe(local.segment, SHM, deadline)
    assert transport.endpoints == 2
    transport.release(held[0])
    transport.forget(local.segment, SHM)
    assert transport.endpoints == 1
    transport.release(held[1])  # its path was forgotten meanwhile
    assert transport.endpoints == 0
    assert transport.probe(local.segment, SHM, deadline)
    transport.maintain(time.monotonic())
    assert transport.endpoints == 1
    transport.maintain(time.monotonic() + 10 * LIMITS.idle_s)
    assert transport.endpoints == 0
    assert transport.probe(local.segment, SHM, deadline)
    transport.close()
    assert transport.endpoints == 0
    assert near.run(READ, local.segment, parts) == SHUTDOWN


def test_no_file_is_left_open(make_near, start_peer, impostor) -> None:
    peer = start_peer()
    liar = impostor(b"!" * shm_wire.PROOF_BYTES)

    def files() -> tuple[int, int]:
        return len(open_files()), peer.ask("state")[3]

    most: list[int] = []

    def none_is_left() -> bool:
        return not most or all(now <= then for now, then in zip(files(), most, strict=True))

    for _ in range(3):
        near = make_near()
        for opcode in (READ, WRITE):
            assert near.run(opcode, peer.segment, [(0, peer.key, 0, 8)]) == DONE
        assert near.run(READ, liar, [(0, peer.key, 0, 8)]).status is TransferStatus.FAILED
        near.transport.close()
        eventually(lambda: peer.ask("state")[0] == 0, "the peer's links are gone")
        eventually(none_is_left, "no file is left open")
        most = most or list(files())
