"""The answering side of RDMA, with an HCA that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.transports.rdma import server
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.verbs import VerbsError
from pinyon.transfer.transports.rdma.wire import Half, RdmaCode, RdmaOp
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.limits import TransferLimits

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
