"""A node's entries in Redis stay true whatever goes wrong in one attempt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pinyon.core.errors import Unavailable
from pinyon.eviction import Lru
from pinyon.paging import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.objects import ObjectTable
from pinyon.store.records import Life, NodeRecord, NodeRoom
from services.kvstore.publisher import DEAD_GRACE_S, REGISTER_S, MetadataPublisher

RECORD = NodeRecord("kv-0", "0" * 32, "127.0.0.1:1", 1 << 20)
KEYS = [bytes([number]) * 16 for number in range(4)]


class Metadata:
    """A Redis that fails once in each kind of question."""

    malformed = 0

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.failed: set[str] = set()
        self.entries: set[bytes] = {KEYS[3]}  # an entry that was never unlisted
        self.renewals = 0
        self.cleaned = 0

    def _fail_once(self, question: str) -> None:
        if question not in self.failed:
            self.failed.add(question)
            raise self.error

    async def renew(self, node: NodeRecord, lease_s: float) -> bool:
        self._fail_once("renew")
        self.renewals += 1
        return bool(self.entries)

    async def restart(self, life: Life) -> None: ...

    async def listed(self, node_id: str) -> set[bytes]:
        self._fail_once("listed")
        return set(self.entries)

    async def change(self, life: Life, gone: Sequence[bytes], come: Sequence[tuple[bytes, bytes]]) -> None:
        self._fail_once("change")
        self.entries.difference_update(gone)
        self.entries.update(key for key, _ in come)

    async def nodes(self) -> list[NodeRecord]:
        self._fail_once("nodes")
        self.cleaned += 1
        return [RECORD]

    async def names(self) -> list[str]:
        return [RECORD.node_id]

    async def leave(self, node: NodeRecord) -> None: ...


class Node:
    def __init__(self) -> None:
        self.table = ObjectTable(OffsetAllocator(1 << 20), Lru(), LeaseTable())
        self.changed: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        self.changed = callback

    def room(self) -> NodeRoom:
        return NodeRoom()

    async def share_pool(self, others_bytes: int) -> None: ...

    def put(self, key: bytes) -> None:
        put_id, _ = self.table.put_start([key], 64, 0.0, 1.0)
        self.table.close_put(put_id)
        self.table.end_put(put_id, commit=True, now_s=0.0)
        self.changed()


def publishing(metadata: Any, clock: Callable[[], float] = lambda: 0.0, node: Any = None) -> MetadataPublisher:
    return MetadataPublisher(node or Node(), RECORD, metadata, 3.0, clock=clock)


@pytest.mark.parametrize("error", [Unavailable("away"), RuntimeError("a defect")])
async def test_one_failure_of_any_kind_ends_no_duty(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = SimpleNamespace(**{**vars(asyncio), "sleep": lambda _: asyncio.sleep(0)})
    monkeypatch.setattr("services.kvstore.publisher.asyncio", fast)
    metadata, node = Metadata(error), Node()
    publisher = publishing(metadata, node=node)
    publisher.start()
    node.put(KEYS[0])
    async with asyncio.timeout(60):
        while metadata.entries != {KEYS[0]} or metadata.renewals < 3 or not metadata.cleaned:  # noqa: ASYNC110
            await asyncio.sleep(0)
        metadata.entries.clear()  # the entries are lost, and nothing else tells so
        while metadata.entries != {KEYS[0]}:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert publisher.losses
    assert publisher.failures >= 4
    assert metadata.failed == {"renew", "listed", "change", "nodes"}
    await publisher.close()


async def test_a_node_is_forgotten_when_it_has_long_been_gone() -> None:
    """Another node without a record may have lost Redis for a moment."""
    forgotten: list[str] = []

    class Names(Metadata):
        async def nodes(self) -> list[NodeRecord]:
            return [NodeRecord("kv-1", "3" * 32, "127.0.0.1:2", 1 << 20)]

        async def names(self) -> list[str]:
            return ["kv-0", "kv-1", "kv-2"]

        async def forget(self, node_id: str) -> bool:
            forgotten.append(node_id)
            return True

    now: list[float] = [0.0]
    publisher = publishing(Names(Unavailable("away")), lambda: now[0])
    for now[0] in (0.0, DEAD_GRACE_S - 1):
        await publisher.clean()
        assert forgotten == []
    now[0] = DEAD_GRACE_S
    await publisher.clean()
    assert forgotten == ["kv-2"], "and never itself"


class Starting:
    """A Redis that is absent for the first ``missing`` times."""

    malformed = 0

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.asked = 0

    async def register(self, node: NodeRecord, lease_s: float) -> None:
        self.asked += 1
        if self.asked <= self.missing:
            raise Unavailable("nobody there")


@pytest.mark.parametrize(("missing", "asked"), [(0, 1), (3, 4)])
async def test_a_redis_that_is_starting_is_waited_for(missing: int, asked: int) -> None:
    metadata = Starting(missing)
    await publishing(metadata).register()
    assert metadata.asked == asked


async def test_a_redis_that_does_not_come_ends_the_start() -> None:
    metadata = Starting(1 << 30)
    ticks = itertools.count(0.0, REGISTER_S / 2)
    with pytest.raises(Unavailable, match="is --redis-url right"):
        await publishing(metadata, lambda: next(ticks)).register()
    assert metadata.asked <= 4
