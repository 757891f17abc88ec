"""Copies of a node's objects at other nodes: they go there as any put does, with the checksums that they came with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, InvalidArgument, NotFound
from pinyon.core.request import RequestClass
from pinyon.eviction.interface import kind_and_turn
from pinyon.store.background import Background
from pinyon.store.hot_reads import to_copy
from pinyon.store.kv_object import CHECKSUM_BYTES, KvObject
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.records import NodeRecord
from pinyon.store.writer import BlockWriter, PutOutcome
from pinyon.transfer import TransferEngine
from services.kvstore.node import StoreNode

COPY_S = 10.0
"""The seconds for one put, after which its room is given back; also the limit of copies that name none."""
COPY_MAX_S = 60.0
"""The longest time limit of copies, in seconds."""
COPY_BYTES = 32 << 20
"""The bytes that are on their way at once, for one of at most ``COPIES_AT_ONCE`` callers.

They are at most a quarter of the memory, because those that are on the disk are read into it first."""
COPY_OBJECTS = 256
COPIES_AT_ONCE = 4
SHARE = 10
"""The conductor's orders fill at most one part in so many of another node's memory at a time."""
_THERE = (PutOutcome.STORED, PutOutcome.EXISTS)


class Copier:
    """A copier of one node's objects. ``close`` it."""

    def __init__(
        self,
        node: StoreNode,
        engine: TransferEngine,
        metadata: StoreMetadata,
        channels: NodeChannels,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._node, self._metadata, self._clock = node, metadata, clock
        self._writer = BlockWriter(engine, channels, clock=clock)
        self._duties = Background()
        self._turns = asyncio.Semaphore(COPIES_AT_ONCE)
        self.copied = self.copied_bytes = 0
        """The objects that were copied to other nodes, and their bytes."""

    async def close(self) -> None:
        await self._duties.close(0.0)
        await self._writer.close()

    def ordered(self, order: conductor_pb2.CopyOrder) -> None:
        """Begins to do what the conductor orders, unless an order is still being carried out: there will be another."""
        if not self._duties:
            self._duties.run(self._share(order.target, order.reads), "copies of hot blocks")

    async def _share(self, target: str, reads: int) -> None:
        """Copies hot blocks to the node ``target`` until so many of their last window's reads would go there."""
        hot = self._node.reads.hot
        located = await self._metadata.locate([key for key, _ in hot])
        holders = [[each.node.node_id for each in replicas] for replicas in located]
        keys = to_copy(hot, holders, target, reads)
        room = sum([each.capacity_bytes for each in await self._metadata.nodes() if each.node_id == target]) // SHARE
        sizes = accumulate(entry[0] if (entry := self._node.table.entry(key)) else 0 for key in keys)
        fitting = [key for key, size in zip(keys, sizes, strict=True) if size <= room]
        await self.replicate(fitting, target, COPY_S)

    async def replicate(self, keys: Sequence[bytes], target: str, timeout_s: float) -> int:
        """Copies objects to the node of this id, within ``timeout_s`` (0: ``COPY_S``); returns how many are there now.

        Raises :class:`NotFound` if there is no such node, and the target's error if it takes none of them."""
        if target == self._node.node_id:
            raise InvalidArgument("a node needs no copy for itself", field="target")
        deadline = self._clock() + min(timeout_s or COPY_S, COPY_MAX_S)
        known = {node.node_id: node for node in await self._metadata.nodes()}
        if target not in known:
            raise NotFound(f"there is no store node {target!r}", field="target")
        return len(await self.copy(keys, known[target], deadline))

    async def copy(self, keys: Sequence[bytes], target: NodeRecord, deadline: float | None = None) -> list[bytes]:
        """Copies objects until ``deadline`` by the clock (None: ``COPY_MAX_S`` after its turn has come).

        Returns those that the target has then. Objects that are not here are skipped. Raises the target's error if it
        cannot take them, and :class:`DeadlineExceeded`."""
        there: list[bytes] = []
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):
                await self._turns.acquire()
        except TimeoutError:
            raise DeadlineExceeded("too many copies are being made") from None
        try:
            deadline = self._clock() + COPY_MAX_S if deadline is None else deadline
            for part in self._parts(keys):
                if there and self._clock() >= deadline:
                    break
                self._left_s(deadline)
                async with self._node.holding(part) as objects:
                    for alike in _alike(objects):
                        there += await self._write(alike, target, deadline)
        finally:
            self._turns.release()
        return there

    def _parts(self, keys: Sequence[bytes]) -> Iterator[list[bytes]]:
        """Yields the keys in parts whose objects may be on their way at once."""
        part: list[bytes] = []
        left = room = min(COPY_BYTES, self._node.table.capacity_bytes // 4)
        for key in keys:
            entry = self._node.table.entry(key)
            size = entry[0] if entry else 0
            if part and (size > left or len(part) >= COPY_OBJECTS):
                yield part
                part, left = [], room
            part.append(key)
            left -= size
        if part:
            yield part

    def _left_s(self, deadline: float) -> float:
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("no time left to copy objects")
        return left_s

    async def _write(self, objects: Sequence[KvObject], target: NodeRecord, deadline: float) -> list[bytes]:
        """Puts objects that are alike to the target."""
        left_s = min(COPY_S, self._left_s(deadline))
        size, sums = objects[0].size, objects[0].checksums
        outcomes = await self._writer.write(
            target.address,
            [(each.key, [self._node.piece(each)]) for each in objects],
            size,
            left_s,
            _class_of(objects[0]),
            [each.place for each in objects],
            max(1, len(sums) // CHECKSUM_BYTES),
            [each.checksums for each in objects],
            copies=True,
        )
        stored = outcomes.count(PutOutcome.STORED)
        self.copied += stored
        self.copied_bytes += stored * size
        there = [each.key for each, outcome in zip(objects, outcomes, strict=True) if outcome in _THERE]
        self._node.note_copies(there)
        return there


def _alike(objects: Sequence[KvObject]) -> list[list[KvObject]]:
    """Returns the objects by what one put has in common: size, number of checksums, traits and tenant."""
    found: dict[Any, list[KvObject]] = {}
    for each in objects:
        found.setdefault((each.size, len(each.checksums), each.traits, each.tenant), []).append(each)
    return list(found.values())


def _class_of(held: KvObject) -> RequestClass:
    kind, turn = kind_and_turn(held.traits.category)
    return RequestClass(kind, max(1, turn), tenant=held.tenant)  # the owner's, whoever read it last
