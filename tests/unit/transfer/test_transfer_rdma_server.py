"""The answering side of RDMA, with an HCA that does nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.region import Access
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.rdma import server
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.verbs import VerbsError
from pinyon.transfer.transports.rdma.wire import Half, RdmaCode, RdmaOp, RegionGrant
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.request import Reason

HALF = Half(b"\x01" * 16, 0, 17, 4711, 3, 16, 8 << 20)


class Resource:
    held = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.pd = self
        Resource.held += 1

    def connect(self, *_: object) -> None:
        raise VerbsError("no route to the peer")

    def close(self) -> None:
        Resource.held -= 1


class Hcas:
    mtu = reads_in = 4

    def use(self, *_: object) -> Hcas:
        return self

    def leave(self, *_: object) -> None: ...


class Memory:
    def __init__(self) -> None:
        self.on_revoke: list[Any] = []


class Link:
    """An inbound link on which ``data`` has arrived."""

    def __init__(self, data: bytes) -> None:
        self.stream = self
        self.data = data
        self.sent: list[bytes] = []
        self.on_end: list[Callable[[], None]] = []

    def receive_request(self, head: memoryview) -> bool:
        if not self.data:
            return False
        head[:] = self.receive_bytes(len(head), 0.0)
        return True

    def receive_bytes(self, count: int, _: float) -> bytes:
        data, self.data = self.data[:count], self.data[count:]
        return data

    def send(self, parts: list[bytes], _: float) -> None:
        self.sent += parts

    def abort(self) -> None: ...


def test_a_link_has_one_try_to_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed pairing's resources on the HCA end with the link, so the link may not ask for a second pairing."""
    monkeypatch.setattr(server, "LentMemory", Resource)
    monkeypatch.setattr(server, "QueuePair", Resource)
    monkeypatch.setattr(Resource, "held", 0)
    link = Link(rdma_wire.pack_pair("mlx5_0", HALF) * 100)
    serving: Any = server.RdmaServer(EngineContext(bytes(16), Memory(), TransferLimits()), Hcas())  # type: ignore[arg-type]
    with pytest.raises(WireError, match="second PAIR"):
        serving.serve(link)
    assert [rdma_wire.parse_reply(each, RdmaOp.PAIR, 1).code for each in link.sent] == [RdmaCode.NO_ROOM]
    assert Resource.held == 2
    for undo in reversed(link.on_end):
        undo()
    assert Resource.held == 0


def test_a_revoked_grant_is_taken_back_from_all_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that still asks for it is lent nothing; other grants stay with their links."""
    freed: list[str] = []

    class Handle:
        rkey = 7

        def __init__(self, name: str) -> None:
            self.close = lambda: freed.append(name)

    class OneLink(server.LentMemory):
        def __init__(self, name: str) -> None:
            self._lock, self._lent, self._asked, self.pd = threading.Lock(), {}, set(), name

    monkeypatch.setattr(server, "register_memory", lambda pd, region, start, size, access: (Handle(pd), start))
    memory = MemoryTable()
    serving = server.RdmaServer(EngineContext(bytes(16), memory, TransferLimits()), Hcas())  # type: ignore[arg-type]
    region = memory.register(bytearray(100), None, Access.NONE)
    grant, other = (memory.grant(region, [(0, 10), (20, 10)], Access.READ) for _ in range(2))
    links = [OneLink("first"), OneLink("second")]
    serving._lent.update(links)
    for link in links:
        for one in (grant, other, grant):
            assert link.lend(one) == RegionGrant(0, 1, one.spans, ((7, 0), (7, 20)))
    assert not memory.revoke_now(grant), "to take it back is a system call per range"
    memory.revoke(grant, 1.0)
    assert sorted(freed) == ["first", "first", "second", "second"]
    assert [link.lend(grant) for link in links] == [RegionGrant(Reason.UNKNOWN_REGION)] * 2
    memory.unregister(region, 1.0)
    assert len(freed) == 8
