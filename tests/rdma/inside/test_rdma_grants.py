"""Grants over RDMA: the adapter itself refuses what a key does not open, and revoked keys."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pinyon.transfer import Access, Grant, Network, Opcode, Reason, Region, TransferEngine, TransferStatus
from pinyon.transfer.transports.rdma.endpoint import RdmaEndpoint
from pinyon.transfer.transports.rdma.wire import RegionGrant
from tests.rdma.inside.rdma_hosts import LIMITS, RAIL_0, SECRET, HostA, resources
from tests.rdma.inside.rdma_nics import rdma_nic
from tests.waiting import wait_until

SIZE = 1 << 20
READ, WRITE = Opcode.READ, Opcode.WRITE
COMPLETED = (TransferStatus.COMPLETED, Reason.NONE, None)
UNKNOWN, OUTSIDE, DENIED = Reason.UNKNOWN_REGION, Reason.OUT_OF_RANGE, Reason.ACCESS_DENIED


class Server:
    """An engine with memory that no key opens yet."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.engine = TransferEngine(
            network=Network([rdma_nic("b0"), rdma_nic("b1")]),
            secret=SECRET,
            transports=("rdma",),
            limits=LIMITS,
            clock=lambda: time.monotonic() + self.ahead_s,
        )
        self.engine.start()
        self.memory = bytearray(bytes(range(256)) * (SIZE // 256))
        self.region = self.engine.register_local_memory(self.memory, access=Access.NONE)

    def grant(self, access: Access, *ranges: tuple[int, int], lifetime_s: float | None = None) -> Grant:
        return self.engine.grant(self.region, ranges, access, lifetime_s=lifetime_s)


@pytest.fixture
def server() -> Iterator[Server]:
    before = resources(of_b=True)
    one = Server()
    yield one
    one.engine.close()
    wait_until(lambda: resources(of_b=True) == before, "protection domains and registrations are freed")


class Client:
    """Host a with memory and its adapter's knowledge of the server's memory."""

    def __init__(self, server: Server, host: HostA) -> None:
        self.segment = server.engine.descriptor([])
        self.host = host
        self.memory = bytearray(SIZE)
        self.local: Region = host.register(self.memory)

    def move(self, opcode: Opcode, *moves: tuple[Grant, int, int]) -> tuple[object, ...]:
        """Runs moves of ``(grant, offset there, length)``, whose bytes lie at the same offset here."""
        parts = [(self.local.key, at % SIZE, grant.key, at, length) for grant, at, length in moves]
        return tuple(self.host.run(self.segment, opcode, parts))

    def told(self, opcode: Opcode, grant: Grant) -> tuple[RdmaEndpoint, RegionGrant]:
        """Returns the pooled endpoint and its knowledge of the grant. Callers return the endpoint with ``lie``."""
        chain = self.host.chain(self.segment, opcode, [(self.local.key, 0, grant.key, 0, 1)])
        endpoint = self.host.transport.lease(chain, RAIL_0)
        assert isinstance(endpoint, RdmaEndpoint)
        return endpoint, endpoint._keys.opened[grant.key]

    def lie(self, endpoint: RdmaEndpoint, grant: Grant, told: RegionGrant) -> None:
        """Replaces what the initiator knows of the grant, and returns the endpoint."""
        endpoint._keys.opened[grant.key] = told
        self.host.transport.release(endpoint)


@pytest.fixture
def host() -> Iterator[HostA]:
    one = HostA()
    yield one
    one.close()


@pytest.fixture
def client(server: Server, host: HostA) -> Client:
    return Client(server, host)


def test_an_rdma_key_opens_only_its_ranges_in_its_direction(server: Server, client: Client) -> None:
    ranges = (4096, 8192), (100_001, 4097), (500_000, 200_000)
    reader, writer = server.grant(Access.READ, *ranges), server.grant(Access.WRITE, *ranges)
    before = bytes(server.memory)
    assert client.move(READ, *((reader, at, size) for at, size in ranges)) == COMPLETED
    for at, size in ranges:
        assert client.memory[at : at + size] == server.memory[at : at + size]
        assert client.memory[at - 1 : at] == client.memory[at + size : at + size + 1] == b"\0"
    client.memory[:] = b"\xee" * SIZE
    refused = client.move(
        WRITE, (writer, 0, 1), (writer, 4095, 2), (writer, 12287, 2), (writer, 4096, 1), (reader, 4096, 1)
    )
    assert refused == (TransferStatus.COMPLETED, Reason.NONE, bytes([OUTSIDE, OUTSIDE, OUTSIDE, 0, DENIED]))
    assert client.move(WRITE, *((writer, at, size) for at, size in ranges)) == COMPLETED
    for at, size in ranges:
        assert server.memory[at : at + size] == b"\xee" * size
    opened = {byte for at, size in ranges for byte in range(at, at + size)}
    assert all(server.memory[at] == before[at] for at in range(SIZE) if at not in opened)
    assert client.move(READ, (writer, 4096, 1))[2] == bytes([DENIED])
    assert client.move(READ, (reader, SIZE, 1))[2] == bytes([OUTSIDE])
    for grant in (reader, writer):
        server.engine.revoke(grant)


@pytest.mark.parametrize(
    ("opcode", "shift", "rights"),
    [(READ, -1, 3), (READ, 1, 3), (WRITE, -1, 3), (WRITE, 1, 3), (WRITE, 0, 1), (READ, 0, 2)],
)
def test_the_adapter_refuses_what_a_lying_initiator_asks_for(
    server: Server, client: Client, opcode: Opcode, shift: int, rights: int
) -> None:
    """Access one byte beside the range, or in the other direction, with the adapter's own key."""
    grant = server.grant(Access(rights), (4096, 8192))
    before = bytes(server.memory)
    granted = READ if rights & 1 else WRITE
    client.memory[:] = server.memory
    assert client.move(granted, (grant, 4096, 8192)) == COMPLETED
    client.memory[:] = b"\xee" * SIZE
    endpoint, told = client.told(granted, grant)
    ((rkey, address),) = told.keys
    client.lie(endpoint, grant, told._replace(access=3, keys=((rkey, address + shift),)))
    outcome = client.move(opcode, (grant, 4096, 8192))
    # The queue pair broke; a fresh one got the true grant.
    denied = rights != 3
    assert outcome == ((TransferStatus.COMPLETED, Reason.NONE, bytes([DENIED])) if denied else COMPLETED)
    if denied or opcode is READ:
        assert server.memory == before
    else:
        assert server.memory == before[:4096] + b"\xee" * 8192 + before[12288:]
    if denied:
        assert client.memory == b"\xee" * SIZE
    server.engine.revoke(grant)


@pytest.mark.parametrize("opcode", Opcode)
def test_what_was_taken_back_is_refused_by_the_adapter(server: Server, client: Client, opcode: Opcode) -> None:
    grant = server.grant(Access.READ_WRITE, (0, 4096), (8192, 4096))
    other = server.grant(Access.READ_WRITE, (0, 4096))
    assert client.move(opcode, (grant, 0, 4096), (grant, 8192, 4096), (other, 0, 4096)) == COMPLETED
    endpoint, told = client.told(opcode, grant)
    assert len(told.keys) == 2
    client.lie(endpoint, grant, told)  # the client still has the adapter's keys
    assert not server.engine.revoke_now(grant), "there is something to be taken back"
    server.engine.revoke(grant)
    server.memory[:] = b"\x11" * SIZE
    client.memory[:] = b"\xee" * SIZE
    refused = (TransferStatus.COMPLETED, Reason.NONE, bytes([UNKNOWN]))
    assert client.move(opcode, (grant, 8192, 4096)) == refused
    assert server.memory == b"\x11" * SIZE
    assert client.memory == b"\xee" * SIZE
    assert client.move(opcode, (other, 0, 4096)) == COMPLETED
    server.engine.revoke(other)


def test_an_adapters_key_is_of_no_use_on_another_link(server: Server, client: Client) -> None:
    """A key has 32 bits and can be guessed, but a stolen one opens nothing on another link."""
    grant = server.grant(Access.READ_WRITE, (0, 4096))
    assert client.move(READ, (grant, 0, 4096)) == COMPLETED
    endpoint, stolen = client.told(READ, grant)
    client.host.transport.release(endpoint)
    thief_host = HostA()
    try:
        thief = Client(server, thief_host)
        bait = server.grant(Access.READ_WRITE, (8192, 4096))
        assert thief.move(READ, (bait, 8192, 4096)) == COMPLETED
        endpoint, mine = thief.told(READ, bait)
        ((_, address),) = mine.keys
        thief.lie(endpoint, bait, mine._replace(keys=((stolen.keys[0][0], address - 8192),)))
        thief.memory[:] = b"\xee" * SIZE
        server.memory[:4096] = b"\x11" * 4096
        # The adapter refused the stolen key; a fresh queue pair read what the thief may read.
        assert thief.move(READ, (bait, 8192, 4096)) == COMPLETED
        assert thief.memory[8192:12288] == server.memory[8192:12288] != server.memory[:4096]
        server.engine.revoke(bait)
    finally:
        thief_host.close()
    assert client.move(READ, (grant, 0, 4096)) == COMPLETED, "the owner's link lives"
    server.engine.revoke(grant)


def test_a_key_ends_by_its_time(server: Server, client: Client) -> None:
    grant = server.grant(Access.READ, (0, 4096), lifetime_s=1000.0)
    assert client.move(READ, (grant, 0, 4096)) == COMPLETED
    server.ahead_s = 1000.0
    refused = (TransferStatus.COMPLETED, Reason.NONE, bytes([UNKNOWN]))
    wait_until(lambda: client.move(READ, (grant, 0, 4096)) == refused, "the adapter forgets it")
    assert server.engine.stats().grants_now == 0


def test_hundreds_of_leases_leave_nothing(server: Server, client: Client) -> None:
    assert client.move(READ, (server.grant(Access.READ, (0, 64)), 0, 64)) == COMPLETED
    before = resources(of_b=True)
    taken = []
    for number in range(200):
        grant = server.grant(Access.READ, *((at * 8192 % SIZE, 4096) for at in range(number % 4 + 1)))
        assert client.move(READ, (grant, 0, 4096)) == COMPLETED
        began = time.perf_counter()
        server.engine.revoke(grant)
        taken.append(time.perf_counter() - began)
    assert resources(of_b=True) == before
    print(f"revoke of 1 to 4 ranges: p50 {sorted(taken)[100] * 1e6:.0f} us")
