"""The remains of NIXL in a process: connections that UCX never gives back, buffers, descriptors, variables."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pinyon.transfer import Opcode, TransferEngine, TransferRequest, Transports
from pinyon.transfer.paths.reach import NIXL
from pinyon.transfer.transports.nixl import transport as nixl_transport
from pinyon.transfer.transports.nixl.agent import (
    BUFFER_BYTES,
    MOST_CONNECTIONS,
    MOST_FAILED_PROOFS,
    NixlAgent,
    NixlError,
)
from pinyon.transfer.transports.nixl.process_state import closed_on_exec, ucx_environment
from pinyon.transfer.transports.nixl.transport import NixlTransport
from tests.unit.transfer.conftest import GENEROUS_S, PATIENT, Pair
from tests.unit.transfer.fake_nixl import FakeError, FakeNixl, Raw, Request, fake_nixl
from tests.unit.transfer.nixl_pairs import nixl_pair

READ = Opcode.READ
SIZE = 1 << 20


@pytest.fixture
def fake() -> Iterator[FakeNixl]:
    with fake_nixl() as fake:
        yield fake


@pytest.fixture
def pair(fake: FakeNixl) -> Iterator[Pair]:
    with nixl_pair(b"f" * SIZE) as pair:
        yield pair


def nixl_of(engine: TransferEngine) -> NixlTransport:
    transport = engine._peers.transports["nixl"]
    assert isinstance(transport, NixlTransport)
    return transport


def raw_of(engine: TransferEngine, fake: FakeNixl) -> Raw:
    return fake.agents[engine.boot_id.hex()]


def chains(engine: TransferEngine, transport: str) -> int:
    return sum(one.chains for one in engine.stats().paths if one.path.transport == transport)


# --- connections ---


def test_idle_links_that_end_leave_the_agents_connected(pair: Pair, fake: FakeNixl) -> None:
    nixl = nixl_of(pair.engine)
    for _ in range(3 * MOST_CONNECTIONS):
        assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
        nixl.maintain(time.monotonic() + 2 * PATIENT.idle_s)
        assert nixl.endpoints == 0
    assert chains(pair.engine, "tcp") == 0
    assert (raw_of(pair.engine, fake).connects, raw_of(pair.engine, fake).forgets) == (1, 0)


def test_memory_registered_again_leaves_the_agents_connected(pair: Pair, fake: FakeNixl) -> None:
    remote = pair.remote
    for number in range(2 * MOST_CONNECTIONS):
        pair.far[:4096] = bytes([number]) * 4096
        assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)._replace(remote_region=remote.key)])[0].ok
        assert pair.near[:4096] == pair.far[:4096]
        pair.server.unregister(remote)
        remote = pair.server.register_local_memory(pair.far)
    assert chains(pair.engine, "tcp") == 0
    assert (raw_of(pair.engine, fake).connects, raw_of(pair.engine, fake).forgets) == (1, 0)


def test_memory_replaced_in_place_costs_bounded_connections(pair: Pair, fake: FakeNixl) -> None:
    remote = pair.remote
    reads = MOST_CONNECTIONS + 5
    for start in range(1, reads + 1):
        pair.server.unregister(remote)
        remote = pair.server.register_local_memory(memoryview(pair.far)[start:])
        pair.far[start : start + 4096] = bytes([start]) * 4096
        assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)._replace(remote_region=remote.key)])[0].ok
        assert pair.near[:4096] == bytes([start]) * 4096
    raw = raw_of(pair.engine, fake)
    assert (raw.connects, raw.forgets) == (MOST_CONNECTIONS, MOST_CONNECTIONS - 1)
    assert (chains(pair.engine, "nixl"), chains(pair.engine, "tcp")) == (MOST_CONNECTIONS, reads - MOST_CONNECTIONS)
    nixl_of(pair.engine).maintain(time.monotonic() + 2 * PATIENT.idle_s)
    known = pair.server.register_local_memory(bytearray(100))
    assert pair.engine.transfer([pair.request(READ, 0, 0, 100)._replace(remote_region=known.key)])[0].ok
    assert chains(pair.engine, "nixl") == MOST_CONNECTIONS + 1, "memory elsewhere is still read by NIXL"


def test_a_failed_proof_is_tried_a_bounded_number_of_times(
    pair: Pair, fake: FakeNixl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_transport, "PROOF_S", 0.05)
    fake.served_by_peers = True
    nixl = nixl_of(pair.engine)
    for number in range(MOST_FAILED_PROOFS + 2):
        with pytest.raises(NixlError) as caught:
            nixl.connect(pair.segment, NIXL, time.monotonic() + GENEROUS_S, 0)
        assert ("not any more" in str(caught.value)) is (number >= MOST_FAILED_PROOFS)
    assert raw_of(pair.engine, fake).connects == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert pair.segment.boot_id.hex() in warnings[0]
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert chains(pair.engine, "nixl") == 0


def test_a_connection_that_broke_is_made_anew(pair: Pair, fake: FakeNixl) -> None:
    failures = iter(range(2))

    def fail(one: Request) -> None:  # fails the READ, and that of the next pairing
        if next(failures, None) is not None:
            raise FakeError("NIXL_ERR_REMOTE_DISCONNECT")

    nixl = nixl_of(pair.engine)
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    fake.before = fail
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert nixl.probe(pair.segment, NIXL, time.monotonic() + GENEROUS_S)
    assert (raw_of(pair.engine, fake).connects, raw_of(pair.engine, fake).forgets) == (2, 1)


def test_a_read_that_fails_by_itself_leaves_the_agents_connected(pair: Pair, fake: FakeNixl) -> None:
    """The READ fails like one of memory that the peer has unmapped meanwhile."""
    failures = iter([True])

    def fail(one: Request) -> None:
        if next(failures, False):
            raise FakeError("NIXL_ERR_BACKEND")

    nixl = nixl_of(pair.engine)
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    fake.before = fail
    assert pair.engine.transfer([pair.request(READ, 0, 0, 4096)])[0].ok
    assert nixl.probe(pair.segment, NIXL, time.monotonic() + GENEROUS_S)
    assert (raw_of(pair.engine, fake).connects, raw_of(pair.engine, fake).forgets) == (1, 0)


def test_a_peer_whose_transfers_hang_leaves_room_for_others(fake: FakeNixl) -> None:
    agent, hung, other = (NixlAgent(name) for name in ("reader", "hung", "other"))
    here = agent.new_buffer(4096)
    pages = {each.name: each.new_buffer(4096) for each in (hung, other)}
    told = {each.name: each.metadata(pages[each.name].registered, connection=True) for each in (hung, other)}
    fake.holds = lambda request: True
    for _ in range(8):
        agent.meet("hung", told["hung"])
        request = agent.prepare_one(here.address, pages["hung"].address, 16, "hung")
        assert not agent.post(request)
        agent.stray("hung", request, ())
    with pytest.raises(NixlError, match="do not end"):
        agent.meet("hung", told["hung"])
    assert not agent.meet("other", told["other"])
    agent.close()


def test_peers_that_nobody_speaks_to_are_forgotten_above_a_bound(
    fake: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pinyon.transfer.transports.nixl.agent._MOST_IDLE", 2)
    agent, others = NixlAgent("reader"), [NixlAgent(name) for name in "abcd"]
    for other in others:
        page = other.new_buffer(4096)
        agent.meet(other.name, other.metadata(page.registered, connection=True))
    for other in others:
        agent.leave(other.name)
    assert set(fake.agents["reader"].known) == {"c", "d"}
    agent.close()
    assert not fake.agents["reader"].known


def test_what_is_remembered_of_attempts_is_bounded(fake: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pinyon.transfer.transports.nixl.agent._MOST_REMEMBERED", 2)
    agent, others = NixlAgent("reader"), [NixlAgent(name) for name in "abc"]
    told = {each.name: each.metadata(each.new_buffer(4096).registered, connection=True) for each in others}
    for _ in range(MOST_CONNECTIONS):
        agent.meet("a", told["a"])
        agent.spoil("a")
        agent.leave("a")
    with pytest.raises(NixlError, match="not any more"):
        agent.check("a")
    for _ in range(MOST_FAILED_PROOFS - 1):
        agent.proved("b", well=False)
    agent.proved("b", well=True)
    for _ in range(MOST_FAILED_PROOFS):
        agent.check("b")
        agent.proved("b", well=False)
    with pytest.raises(NixlError, match="not any more"):
        agent.check("b")
    for stranger in "cde":
        agent.check(stranger)  # a peer that is only checked pushes out no other
    with pytest.raises(NixlError, match="not any more"):
        agent.check("a")
    agent.meet("c", told["c"])
    agent.leave("c")
    agent.check("a")  # the least recently tried peer was forgotten
    with pytest.raises(NixlError, match="not any more"):
        agent.check("b")
    agent.close()


# --- memory ---


def test_endpoints_share_their_buffers(pair: Pair, fake: FakeNixl) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            server = stack.enter_context(TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT))
            far = server.register_local_memory(bytearray(b"r" * SIZE))
            request = TransferRequest(READ, pair.local.key, 0, server.descriptor(), far.key, 0, SIZE)
            assert pair.engine.transfer([request])[0].ok
        assert nixl_of(pair.engine).endpoints == 4
        large = [end - start for start, end in raw_of(pair.engine, fake).memory if end - start >= BUFFER_BYTES]
        assert len(large) == 2, "the page of seals and one buffer"


def test_buffers_that_lie_ready_are_bounded(fake: FakeNixl) -> None:
    agent = NixlAgent("reader")
    taken = [agent.take_buffer() for _ in range(40)]
    assert len({buffer.address for buffer in taken}) == 40
    for buffer in taken:
        agent.give_buffer(buffer)
    assert len(fake.agents["reader"].memory) == 16
    agent.close()


# --- the process ---


def test_variables_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = dict(os.environ)
    with ucx_environment(loopback=True):
        assert os.environ["UCX_NET_DEVICES"] == "lo"
        assert os.environ["UCX_LOG_LEVEL"] == "info", "the user's"
    assert dict(os.environ) == before


@pytest.mark.parametrize("only_tcp", [False, True])
def test_descriptors_that_appear_are_not_inherited(only_tcp: bool) -> None:
    with socket.socket() as old, socket.socket() as new, socket.socket(type=socket.SOCK_DGRAM) as other:
        old.set_inheritable(True)
        with closed_on_exec(only_tcp=only_tcp):
            new.set_inheritable(True)
            other.set_inheritable(True)
        assert [one.get_inheritable() for one in (old, new, other)] == [True, False, only_tcp]
