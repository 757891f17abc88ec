"""READs by NIXL, on a fake of it: the READs that take this way, and the effects of faults.

Tests with the real NIXL: tests/nixl.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.security import load_security
from pinyon.runtime.transfer_engine import TransferSettings, start_transfer_engine
from pinyon.transfer import (
    Access,
    InvalidTransfer,
    Opcode,
    Reason,
    SegmentDescriptor,
    TransferEngine,
    TransferLimits,
    TransferRequest,
    TransferStatus,
    Transports,
    WireError,
)
from pinyon.transfer.chains.chain import Chain
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.links import handshake
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.links.endpoint import TryAgain
from pinyon.transfer.links.stream import Stream
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.paths.reach import ANY_BYTES, MOST_READ_BYTES, NIXL, PeerPaths, Reach
from pinyon.transfer.transports.nixl import agent as nixl_agent
from pinyon.transfer.transports.nixl import transport as nixl_transport
from pinyon.transfer.transports.nixl import wire
from pinyon.transfer.transports.nixl.agent import NixlAgent
from pinyon.transfer.transports.nixl.transport import NixlEndpoint
from pinyon.transfer.transports.nixl.wire import NixlCode, NixlOp, NixlPlace, Page
from pinyon.transfer.transports.shm.wire import Seal
from pinyon.transfer.types.options import NIXL_MODES
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.spans import Spans
from tests.segments import segment_of, text_of
from tests.tls_files import TestAuthority
from tests.unit.transfer.conftest import GENEROUS_S, PATIENT, Pair, eventually
from tests.unit.transfer.fake_nixl import FakeError, FakeNixl, fake_nixl
from tests.unit.transfer.nixl_pairs import nixl_pair

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 3 << 20
AGENT = "ab" * 16


# --- which way ---

TIERS = {name: (Path(name, "", ""),) for name in ("shm", "rdma", "tcp")}


def test_only_reads_measured_to_gain_by_nixl_go_by_it() -> None:
    def most(mode: str, *others: str, location: str = "cpu:0", has_it: bool = True) -> int:
        remote = SegmentDescriptor("10.0.0.1", 1, b"b" * 16, nixl=has_it)
        return reach(mode).most_read_bytes(remote, location, tuple(TIERS[name] for name in others))

    assert most("auto", "tcp") == MOST_READ_BYTES["tcp"] > 0
    assert most("auto") == most("prefer", "tcp") == ANY_BYTES
    assert most("auto", "shm", "tcp") == MOST_READ_BYTES["shm"]
    assert most("off", "tcp") == most("prefer", "tcp", has_it=False) == most("prefer", "tcp", location="cuda:0") == 0


def test_its_path_comes_first_for_what_goes_by_it() -> None:
    paths = PeerPaths(reach("prefer"), SegmentDescriptor("10.0.0.1", 1, b"b" * 16, nixl=True))
    where = "cpu:0", "cpu:0"
    for _ in range(2):  # a caller without the lock finds nothing out
        assert not paths.known_by_nixl(*where, READ, 1)
    assert [paths.by_nixl(*where, opcode, 1) for opcode in (READ, WRITE)] == [True, False]
    assert [paths.known_by_nixl(*where, opcode, 1) for opcode in (READ, WRITE)] == [True, False]
    assert paths.tiers(*where, by_nixl=True) == ((NIXL,), *paths.tiers(*where))
    paths.exclude(bytes(16), "nixl")
    assert paths.tiers(*where, [bytes(16)], by_nixl=True) == paths.tiers(*where) == (TIERS["tcp"],)


def reach(mode: str) -> Reach:
    return Reach(("tcp",), (), None, b"a" * 16, "this host", TransferLimits(), 8, mode)


# --- pairs of engines ---


@pytest.fixture
def fake() -> Iterator[FakeNixl]:
    with fake_nixl() as fake:
        yield fake


@pytest.fixture
def pair(fake: FakeNixl) -> Iterator[Pair]:
    with nixl_pair((bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]) as pair:
        yield pair


def ways(engine: TransferEngine) -> dict[str, int]:
    return {one.path.transport: one.chains for one in engine.stats().paths if one.chains}


def test_reads_go_by_nixl_and_writes_do_not(pair: Pair) -> None:
    for nbytes in (1, 4096, 65536, 65537, SIZE):
        pair.near[:] = bytes(SIZE)
        assert pair.engine.transfer([pair.request(READ, 0, SIZE - nbytes, nbytes)])[0].ok
        assert pair.near == pair.far[SIZE - nbytes :] + bytes(SIZE - nbytes)
    assert set(ways(pair.engine)) == {"nixl"}
    assert {one.path.transport: one.short for one in pair.engine.stats().paths} == {"nixl": 3}
    assert pair.engine.transfer([pair.request(WRITE, 0, 0, 4096)])[0].ok
    assert ways(pair.engine)["tcp"] == 1


def test_auto_leaves_to_tcp_what_tcp_is_better_at(fake: FakeNixl) -> None:
    size = 8 << 20
    with (
        TransferEngine(transports=Transports(("tcp",), nixl="auto"), limits=PATIENT) as engine,
        TransferEngine(transports=Transports(("tcp",), nixl="auto"), limits=PATIENT) as server,
        TransferEngine(transports=("tcp",), limits=PATIENT) as without,
    ):
        far = server.register_local_memory(bytearray(b"f" * size))
        far_without = without.register_local_memory(bytearray(b"w" * size))
        local = engine.register_local_memory(bytearray(size))

        def way(nbytes: int, peer: TransferEngine = server, key: bytes = far.key) -> str:
            before = ways(engine)
            request = TransferRequest(READ, local.key, 0, peer.descriptor(), key, 0, nbytes)
            assert engine.transfer([request])[0].ok
            (found,) = {name for name, count in ways(engine).items() if count != before.get(name, 0)}
            return found

        for _ in range(2):  # also the short ways
            assert [way(MOST_READ_BYTES["tcp"] + more) for more in (0, 1)] == ["nixl", "tcp"]
            assert way(4096) == "nixl"
            assert way(4096, without, far_without.key) == "tcp"


@contextmanager
def let_go_when_held(fake: FakeNixl) -> Iterator[None]:
    """Ends held READs as soon as there are any, and holds no more."""

    def let_go() -> None:
        eventually(lambda: bool(fake.held), "a READ is held")
        fake.holds = lambda held: False
        fake.let_go()

    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    yield
    thread.join(GENEROUS_S)


async def test_awaited_reads_end_at_once_or_go_by_threads(pair: Pair, fake: FakeNixl) -> None:
    request = pair.request(READ, 0, 0, 4096)
    connecting = iter([True])
    fake.holds = lambda held: next(connecting, False)
    with let_go_when_held(fake):
        assert (await pair.engine.transfer_async([request]))[0].ok
    assert (await pair.engine.transfer_async([request]))[0].ok
    assert [(one.path.transport, one.short) for one in pair.engine.stats().paths] == [("nixl", 1)]
    fake.holds = lambda held: True
    with let_go_when_held(fake):
        assert (await pair.engine.transfer_async([request]))[0].ok
    assert (await pair.engine.transfer_async([request]))[0].ok
    assert pair.near[:4096] == pair.far[:4096]


# --- what goes wrong ---


@pytest.mark.parametrize("nbytes", [4096, SIZE])
def test_revoked_memory_is_refused_and_nothing_of_it_is_stored(pair: Pair, nbytes: int) -> None:
    grant = pair.server.grant(pair.remote, [(0, SIZE)], Access.READ)
    request = pair.request(READ, 0, 0, nbytes)._replace(remote_region=grant.key)
    assert pair.engine.transfer([request])[0].ok  # now the place is known
    pair.server.revoke(grant)
    pair.near[:] = bytes(SIZE)
    pair.far[:] = b"x" * SIZE  # the memory now serves another purpose
    assert pair.engine.transfer([request])[0].reason is Reason.UNKNOWN_REGION
    assert not any(pair.near)


def test_what_is_taken_back_while_it_is_read_is_refused(pair: Pair, fake: FakeNixl) -> None:
    grant = pair.server.grant(pair.remote, [(0, SIZE)], Access.READ)
    request = pair.request(READ, 0, 0, 4096)._replace(remote_region=grant.key)
    assert pair.engine.transfer([request])[0].ok
    pair.near[:] = bytes(SIZE)

    def take_back(one: Any) -> None:
        fake.before = lambda other: None
        pair.server.revoke(grant)

    fake.before = take_back
    assert pair.engine.transfer([request])[0].reason is Reason.UNKNOWN_REGION
    assert not any(pair.near)


def test_a_read_that_does_not_end_stalls_and_lands_nowhere(pair: Pair, fake: FakeNixl) -> None:
    request = pair.request(READ, 0, 0, 4096)
    assert pair.engine.transfer([request])[0].ok
    pair.near[:] = bytes(SIZE)
    fake.holds = lambda held: True
    (result,) = pair.engine.transfer([request], timeout_s=0.4)
    assert result.status is TransferStatus.TIMEOUT
    fake.let_go()  # into a buffer that was kept for it
    assert not any(pair.near)
    fake.holds = lambda held: False
    eventually(lambda: not pair.engine._peers.transports["nixl"]._agent._strays, "what was given up is forgotten")
    assert pair.engine.transfer([request])[0].ok
    assert pair.near[:4096] == pair.far[:4096]


def test_a_read_that_is_cancelled_ends_soon(pair: Pair, fake: FakeNixl) -> None:
    request = pair.request(READ, 0, 0, 4096)
    assert pair.engine.transfer([request])[0].ok
    began = threading.Event()
    fake.holds = lambda held: began.set() or True
    handle = pair.engine.submit([request])
    assert began.wait(GENEROUS_S)
    handle.cancel()
    assert handle.wait(GENEROUS_S)[0].status is TransferStatus.CANCELLED


def test_what_waits_for_nixl_does_not_hold_up_the_rest(fake: FakeNixl) -> None:
    with (
        TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as engine,
        TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as server,
    ):
        local, remote = (one.register_local_memory(bytearray(300_000)) for one in (engine, server))
        write = TransferRequest(WRITE, local.key, 0, server.descriptor(), remote.key, 0, 300_000)
        read = write._replace(opcode=READ)
        assert engine.transfer([read])[0].ok
        began = threading.Event()
        fake.holds = lambda held: began.set() or True
        reads = [engine.submit([read]) for _ in range(3)]
        assert began.wait(GENEROUS_S)
        writes = [engine.submit([write]) for _ in range(20)]  # more than tcp takes at a time
        assert all(each.wait(GENEROUS_S)[0].ok for each in writes)
        assert not any(each.done for each in reads)
        fake.holds = lambda held: False
        fake.let_go()
        assert all(each.wait(GENEROUS_S)[0].ok for each in reads)


def test_a_read_that_fails_goes_another_way(pair: Pair, fake: FakeNixl) -> None:
    def fail(one: Any) -> None:
        raise FakeError("NIXL_ERR_REMOTE_DISCONNECT")

    fake.before = fail
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert set(ways(pair.engine)) == {"tcp"}
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    short = {one.path.transport: one.short for one in pair.engine.stats().paths}
    assert short == {"nixl": 0, "tcp": 1}, "READs beside an avoided path went the long way"


def test_nixl_is_not_used_where_the_peer_must_serve_reads(
    pair: Pair, fake: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "PROOF_S", 0.1)
    fake.served_by_peers = True
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert set(ways(pair.engine)) == {"tcp"}


@pytest.mark.parametrize("served_by_peers", [False, True])
def test_engines_pairing_at_once_prove_nothing_by_each_other(
    fake: FakeNixl, monkeypatch: pytest.MonkeyPatch, served_by_peers: bool
) -> None:
    """The proof of one engine would serve the other's READ, if both were under way."""
    monkeypatch.setattr(nixl_transport, "PROOF_S", 0.1 if served_by_peers else GENEROUS_S)
    fake.served_by_peers = served_by_peers
    with (
        TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as one,
        TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as other,
    ):
        engines = {one: other, other: one}
        regions = {engine: engine.register_local_memory(bytearray(b"r" * 100)) for engine in engines}
        at_once = threading.Barrier(2)
        ended: list[bool] = []

        def read(engine: TransferEngine, peer: TransferEngine) -> None:
            local = engine.register_local_memory(bytearray(100))
            request = TransferRequest(READ, local.key, 0, peer.descriptor(), regions[peer].key, 0, 100)
            at_once.wait(GENEROUS_S)
            ended.append(engine.transfer([request])[0].ok)

        threads = [threading.Thread(target=read, args=pair) for pair in engines.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ended == [True, True]
        assert {*ways(one), *ways(other)} == {"tcp" if served_by_peers else "nixl"}


def test_another_version_of_nixl_is_not_used(fake: FakeNixl) -> None:
    with TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as server:
        fake.version = "1.6.0"
        with TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as engine:
            far, local = server.register_local_memory(bytearray(100)), engine.register_local_memory(bytearray(100))
            request = TransferRequest(READ, local.key, 0, server.descriptor(), far.key, 0, 100)
            assert engine.transfer([request])[0].ok
            assert set(ways(engine)) == {"tcp"}


def test_memory_that_overlaps_with_other_memory_goes_another_way(pair: Pair) -> None:
    again = pair.server.register_local_memory(memoryview(pair.far)[100:200])
    assert pair.engine.transfer([pair.request(READ, 0, 0, 100)])[0].ok
    assert pair.engine.transfer([pair.request(READ, 0, 0, 100)._replace(remote_region=again.key)])[0].ok
    assert pair.near[:100] == pair.far[100:200]
    assert ways(pair.engine) == {"nixl": 1, "tcp": 1}


def test_memory_that_lies_where_other_memory_lay(pair: Pair) -> None:
    request = pair.request(READ, 0, 0, 100)
    assert pair.engine.transfer([request])[0].ok
    pair.server.unregister(pair.remote)
    pair.far[:100] = b"n" * 100
    again = pair.server.register_local_memory(pair.far)
    assert pair.engine.transfer([request])[0].reason is Reason.UNKNOWN_REGION
    assert pair.engine.transfer([request._replace(remote_region=again.key)])[0].ok
    assert pair.near[:100] == b"n" * 100
    assert set(ways(pair.engine)) == {"nixl"}


def test_an_engine_that_closes_leaves_nothing_behind(fake: FakeNixl) -> None:
    with (
        TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as server,
        TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as engine,
    ):
        far, local = server.register_local_memory(bytearray(100)), engine.register_local_memory(bytearray(100))
        request = TransferRequest(READ, local.key, 0, server.descriptor(), far.key, 0, 100)
        assert engine.transfer([request])[0].ok
        near = fake.agents[engine.boot_id.hex()]
        assert near.requests
    assert not near.requests
    assert not near.known


# --- settings ---


def test_it_is_off_unless_asked_for() -> None:
    with TransferEngine() as engine:
        assert not engine.descriptor().nixl
        assert "nixl" not in engine._peers.transports
    assert NIXL_MODES[0] == TransferSettings().transfer_nixl == "off"
    with pytest.raises(InvalidTransfer) as caught:
        TransferEngine(transports=Transports(nixl="maybe"))
    assert caught.value.field == "nixl"


def test_without_the_package_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> SimpleNamespace:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(nixl_agent, "importlib", SimpleNamespace(import_module=nothing))
    nixl_agent._nixl.cache_clear()
    try:
        with pytest.raises(InvalidArgument, match=r"pip install --no-deps 'nixl-cu12") as caught:
            start_transfer_engine(TransferSettings(transfer_nixl="auto"))
    finally:
        nixl_agent._nixl.cache_clear()
    assert caught.value.field == "transfer_nixl"


def test_with_authentication_it_needs_a_word(fake: FakeNixl, tmp_path) -> None:
    authority = TestAuthority(tmp_path / "certs")
    secret = tmp_path / "secret"
    secret.write_text("rosebud\n")
    for values in ({"tls_dir": str(authority.folder("worker", "a"))}, {"cluster_secret_file": str(secret)}):
        settings = TransferSettings(transfer_nixl="auto", **values)
        with pytest.raises(InvalidArgument, match="--transfer-nixl-without-authentication") as caught:
            start_transfer_engine(settings, load_security(settings))
        assert caught.value.field == "transfer_nixl"
        settings = TransferSettings(transfer_nixl="auto", transfer_nixl_without_authentication=True, **values)
        engine = start_transfer_engine(settings, load_security(settings))
        assert engine.descriptor().nixl
        engine.close()


# --- messages ---

PAGE = Page(1 << 40, 1 << 20, b"s" * 16)
METADATA = b"nixlSerDes|Agent" + (32).to_bytes(8, "little") + AGENT.encode() + b"|Conns..."
PLACES = [
    NixlPlace(0, 1 << 30, 8192, Seal((1 << 40) + 16, b"t" * 16), Spans((0, 100), (50, 200)), METADATA),
    NixlPlace(Reason.UNKNOWN_REGION),
]


def test_messages_round_trip() -> None:
    assert wire.parse_paired(wire.pack_paired(PAGE, METADATA), AGENT) == (PAGE, METADATA)
    assert wire.parse_places(wire.pack_places(PLACES), 2, PAGE, AGENT) == PLACES
    keys = [bytes([number]) * 16 for number in range(3)]
    request = wire.pack_request(NixlOp.RESOLVE, b"".join(keys))
    header = wire.parse_request(request[: wire.HEADER_BYTES])
    assert (header.op, wire.request_bytes(header)) == (NixlOp.RESOLVE, 48)
    assert wire.parse_keys(request[wire.HEADER_BYTES :]) == keys
    answer = wire.pack_answer(NixlOp.READY, NixlCode.BUSY)
    assert wire.parse_answer(answer, NixlOp.READY) == (NixlOp.READY, NixlCode.BUSY, 0)


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"garbage",
        METADATA[:20],
        METADATA.replace(AGENT.encode(), b"cd" * 16),
        METADATA.replace(AGENT.encode() + b"|", AGENT.encode() + b"x"),
        METADATA + bytes(wire.MAX_METADATA_BYTES),
    ],
    ids=["empty", "garbage", "cut", "another engine's", "a longer name", "too large"],
)
def test_metadata_that_is_not_the_peers_own_is_not_given_to_nixl(metadata: bytes) -> None:
    with pytest.raises(WireError):
        wire.parse_paired(wire.pack_paired(PAGE, metadata), AGENT)
    with pytest.raises(WireError):
        wire.parse_places(wire.pack_places([PLACES[0]._replace(metadata=metadata)]), 1, PAGE, AGENT)


@pytest.mark.parametrize(
    "place",
    [
        PLACES[0]._replace(code=77),
        PLACES[0]._replace(address=1 << 63),
        PLACES[0]._replace(length=0),
        PLACES[0]._replace(spans=Spans((), ())),
        PLACES[0]._replace(spans=Spans((0, 50), (50, 60))),
        PLACES[0]._replace(spans=Spans((0,), (8193,))),
        PLACES[0]._replace(seal=Seal((1 << 40) + (1 << 20) - 15, b"t" * 16)),
        PLACES[1]._replace(metadata=METADATA),
    ],
)
def test_places_out_of_their_bounds_are_refused(place: NixlPlace) -> None:
    with pytest.raises(WireError):
        wire.parse_places(wire.pack_places([place]), 1, PAGE, AGENT)


@given(st.binary(max_size=300), st.integers(0, 3))
def test_anything_else_is_a_wire_error(data: bytes, count: int) -> None:
    parsers: list[Callable[[], Any]] = [
        lambda: wire.parse_request(data[: wire.HEADER_BYTES]),
        lambda: wire.parse_answer(data[: wire.HEADER_BYTES], NixlOp.RESOLVE),
        lambda: wire.parse_keys(data),
        lambda: wire.parse_paired(data, AGENT),
        lambda: wire.parse_places(data, count, PAGE, AGENT),
        lambda: wire.parse_places(wire.pack_places(PLACES)[: len(data)] + data, 2, PAGE, AGENT),
    ]
    for parse in parsers:
        try:
            parse()
        except WireError:
            continue


class Liar(threading.Thread):
    """A server in a peer's place: it admits initiators as the peer would, then answers PAIR as the test says."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self.answer = answer

    def serve(self, inbound: Any) -> None:
        head = memoryview(bytearray(wire.HEADER_BYTES))
        inbound.stream.receive([head], inbound._clock() + GENEROUS_S)
        inbound.stream.receive_bytes(wire.parse_request(head).size, inbound._clock() + GENEROUS_S)
        inbound.stream.send([self.answer], inbound._clock() + GENEROUS_S)
        inbound.stream.receive_bytes(1, inbound._clock() + GENEROUS_S)


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff" * 64,
        wire.pack_answer(NixlOp.PAIR, NixlCode.OK, wire.pack_paired(PAGE, METADATA)),
        wire.pack_answer(NixlOp.PAIR, NixlCode.OK, wire.pack_paired(PAGE, b"x" * 1000)),
        wire.pack_answer(NixlOp.PAIR, NixlCode.OK, b"")[:-4] + b"\xff\xff\xff\xff",
        wire.pack_answer(NixlOp.PAIR, NixlCode.OTHER_VERSION),
    ],
    ids=["noise", "another engine's", "garbage", "too large", "no"],
)
def test_a_peer_that_lies_is_left_for_another_way(pair: Pair, answer: bytes) -> None:
    pair.server._acceptor.services[4] = Liar(answer)
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert pair.near[:4096] == pair.far[:4096]
    assert set(ways(pair.engine)) == {"tcp"}
    assert pair.engine._peers.transports["nixl"].endpoints == 0


@pytest.mark.parametrize(
    "noise", [bytes(64), wire.pack_request(NixlOp.READY), wire.pack_request(NixlOp.RESOLVE, bytes(16))]
)
def test_an_initiator_that_breaks_the_protocol_is_cut_off(pair: Pair, noise: bytes) -> None:
    hello = handshake.Hello(1, 0, b"c" * 16, pair.segment.boot_id, b"n" * 16, False, handshake.Service.NIXL)
    with socket.create_connection(("127.0.0.1", pair.segment.port), GENEROUS_S) as sock:
        sock.sendall(handshake.pack_hello(hello) + noise)
        eventually(lambda: pair.server.stats().protocol_errors == 1, "counted")
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert set(ways(pair.engine)) == {"nixl"}


def test_an_endless_pairing_holds_up_others_only_for_a_while(pair: Pair) -> None:
    hello = handshake.Hello(1, 0, b"c" * 16, pair.segment.boot_id, b"n" * 16, False, handshake.Service.NIXL)
    with socket.create_connection(("127.0.0.1", pair.segment.port), GENEROUS_S) as sock:
        sock.sendall(handshake.pack_hello(hello) + wire.pack_request(NixlOp.PAIR, b"1.5.1"))
        sock.recv(handshake.HELLO_REPLY_BYTES, socket.MSG_WAITALL)
        head = sock.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)
        sock.recv(wire.parse_answer(head, NixlOp.PAIR).size, socket.MSG_WAITALL)
        sock.sendall(wire.pack_request(NixlOp.READY))
        assert wire.parse_answer(sock.recv(wire.HEADER_BYTES, socket.MSG_WAITALL), NixlOp.READY).code is NixlCode.OK
        assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert pair.near[:4096] == pair.far[:4096]


@pytest.mark.parametrize("reused", [True, False])
def test_a_link_may_end_between_an_answers_header_and_its_body(fake: FakeNixl, reused: bool) -> None:
    context = EngineContext(b"a" * 16, MemoryTable(), PATIENT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    endpoint = NixlEndpoint(context, Link(Stream(ours, GENEROUS_S, 1 << 16), 1), NixlAgent("here"), "there")
    endpoint.reused = reused
    with theirs:
        theirs.sendall(wire.pack_answer(NixlOp.RESOLVE, NixlCode.OK, bytes(100))[: wire.HEADER_BYTES])
        theirs.shutdown(socket.SHUT_WR)
        plan = ChainPlan(SegmentDescriptor("10.0.0.1", 1, bytes(16)), READ, [Slice(0, b"", 0, bytes(16), 0, 1)], 1)
        chain = Chain(plan, {}, time.monotonic() + GENEROUS_S, lambda chain, outcome: None)
        with pytest.raises(TryAgain if reused else ConnectionResetError):
            endpoint.prepare(chain)
    endpoint.close(hard=True)


def test_descriptors_say_who_has_nixl() -> None:
    one = SegmentDescriptor("127.0.0.1", 1, b"b" * 16, nixl=True)
    assert segment_of(text_of(one)) == one
    assert segment_of(text_of(replace(one, nixl=False))) == replace(one, nixl=False)


def test_limits_of_what_is_remembered(fake: FakeNixl) -> None:
    """The engine asks again for keys beyond the number that it remembers."""
    with (
        TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as server,
        TransferEngine(
            transports=Transports(("tcp",), nixl="prefer"), limits=replace(PATIENT, max_regions=3)
        ) as engine,
    ):
        far, local = server.register_local_memory(bytearray(range(100))), engine.register_local_memory(bytearray(100))
        for number in range(20):
            grant = server.grant(far, [(number, 1)], Access.READ)
            request = TransferRequest(READ, local.key, 0, server.descriptor([grant]), grant.key, number, 1)
            assert engine.transfer([request])[0].ok
            assert local.view[0] == number
        assert set(ways(engine)) == {"nixl"}
        assert len(fake.agents[engine.boot_id.hex()].requests) <= 4
