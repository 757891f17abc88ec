"""The KV store as its users see it: put, get, exists, remove by block key (Mooncake §3.2.2).

Where a block lives is looked up in Redis, where a new one goes is decided by rendezvous hashing over the live nodes. A
node that failed is skipped and left alone for a growing pause; the store is a cache, so what cannot be had is a miss.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, InvalidArgument, PinyonError, Unavailable
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_calls import NodeCalls
from pinyon.store.reader import MAX_KEYS, BlockReader
from pinyon.store.records import NodeRecord, Replica
from pinyon.store.rendezvous import rank
from pinyon.store.writer import BlockWriter, WriteOutcome
from pinyon.transfer import Region, TransferEngine

__all__ = ["PutOutcome", "PutResult", "StoreClient", "StoreObject"]

NODES_FRESH_S = 0.5
"""How long the list of nodes is believed; a node's lease is a multiple of this."""
PUT_ATTEMPTS = 2
"""Nodes that are tried for one object."""

_log = get_logger("store")


class StoreObject(NamedTuple):
    """What to put: the content is at byte ``offset`` of ``region``. A plain tuple does as well."""

    key: BlockKey
    region: Region
    offset: int


class PutOutcome(Enum):
    """What became of one object."""

    STORED = "stored"
    EXISTS = "exists"
    """The store has it (or somebody is putting it): nothing was sent."""
    NO_SPACE = "no_space"
    """Everything on the nodes tried is being read or written."""
    FAILED = "failed"
    """No node could be reached, or the bytes did not arrive in time."""


@dataclass(frozen=True)
class PutResult:
    """One outcome per object, in order."""

    outcomes: tuple[PutOutcome, ...]

    def count(self, outcome: PutOutcome) -> int:
        return self.outcomes.count(outcome)

    @property
    def present(self) -> list[bool]:
        """Per object: the store has it now."""
        return [outcome in (PutOutcome.STORED, PutOutcome.EXISTS) for outcome in self.outcomes]


_WRITTEN = {
    WriteOutcome.WRITTEN: PutOutcome.STORED,
    WriteOutcome.EXISTS: PutOutcome.EXISTS,
    WriteOutcome.NO_SPACE: PutOutcome.NO_SPACE,
    WriteOutcome.FAILED: PutOutcome.FAILED,
}


class StoreClient:
    """One per process, on one event loop. It owns ``metadata`` and closes it; the reader belongs to the caller."""

    def __init__(
        self,
        engine: TransferEngine,
        metadata: StoreMetadata,
        reader: BlockReader,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.metadata = metadata
        self._reader = reader
        self._writer = BlockWriter(engine, reader.channels, clock=clock)
        self._calls = NodeCalls(reader.channels)
        self._clock = clock
        self._avoidance = Avoidance()
        self._nodes: list[NodeRecord] = []
        self._nodes_until_s = float("-inf")

    @property
    def aborting(self) -> int:
        """Puts that failed and are being given back."""
        return self._writer.aborting

    async def close(self) -> None:
        """Wait (bounded) for puts that are being given back, then leave Redis."""
        await self._writer.close()
        await self.metadata.close()

    async def nodes(self) -> list[NodeRecord]:
        """Live nodes, by id; known for half a second. Raises :class:`Unavailable` when Redis is."""
        if self._clock() >= self._nodes_until_s:
            self._nodes = await self.metadata.nodes()
            self._nodes_until_s = self._clock() + NODES_FRESH_S
        return self._nodes

    # -- put

    async def put(
        self,
        objects: Sequence[tuple[BlockKey, Region, int]],
        object_bytes: int,
        timeout_s: float,
        *,
        affinity: bytes | None = None,
        request_class: RequestClass = UNKNOWN_CLASS,
    ) -> PutResult:
        """Store ``(key, region, byte offset)`` objects of ``object_bytes`` each, those that the store lacks.

        Objects of one call go to one node, as long as it takes them, because runs of blocks are read as runs.
        ``affinity`` chooses the node: pass the first key of the prompt to keep a whole prompt together; by default the
        first object's key. ``request_class`` is that of the request they were computed for. Takes ``timeout_s``
        at most; when it returns or raises (cancelled, too), the memory is not read any more.

        Raises:
            Unavailable: Redis cannot be asked. Whatever happens to a single object is its outcome, not an error.
        """
        if object_bytes <= 0 or timeout_s <= 0:
            raise InvalidArgument("object_bytes and timeout_s must be positive", field="object_bytes")
        if not objects:
            return PutResult(())
        deadline = self._clock() + timeout_s
        keys = [key for key, _, _ in objects]
        nodes = await self.nodes()
        located = await self.metadata.locate(keys, nodes)
        outcomes = [PutOutcome.FAILED] * len(objects)
        wanted: dict[BlockKey, int] = {}
        for index, (key, replicas) in enumerate(zip(keys, located, strict=True)):
            if key in wanted or any(replica.size_bytes == object_bytes for replica in replicas):
                outcomes[index] = PutOutcome.EXISTS
            else:
                wanted[key] = index
        left = list(wanted.values())
        for node in self._targets(affinity or keys[0], nodes):
            if not left or self._clock() >= deadline:
                break
            for start in range(0, len(left), MAX_KEYS):
                part = left[start : start + MAX_KEYS]
                written = await self._write(
                    node, [objects[index] for index in part], object_bytes, deadline, timeout_s, request_class
                )
                for index, outcome in zip(part, written, strict=True):
                    outcomes[index] = _WRITTEN[outcome]
            left = [index for index in left if outcomes[index] in (PutOutcome.FAILED, PutOutcome.NO_SPACE)]
        return PutResult(tuple(outcomes))

    def _targets(self, affinity: bytes, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        by_id = {node.node_id: node for node in self._usable(nodes)}
        return [by_id[node_id] for node_id in rank(affinity, by_id)[:PUT_ATTEMPTS]]

    async def _write(
        self,
        node: NodeRecord,
        objects: Sequence[tuple[BlockKey, Region, int]],
        object_bytes: int,
        deadline: float,
        whole_s: float,
        request_class: RequestClass,
    ) -> list[WriteOutcome]:
        asked_s = self._clock()
        left_s = deadline - asked_s
        if left_s <= 0:
            return [WriteOutcome.FAILED] * len(objects)  # it is not asked, so nothing is learned about it
        try:
            outcomes = await self._writer.write(node.address, objects, object_bytes, left_s, request_class)
            if WriteOutcome.FAILED in outcomes:
                self._failed(node, DeadlineExceeded("the bytes did not arrive"), left_s, whole_s)
            else:
                self._avoidance.succeeded(str(node.life), asked_s)
            return outcomes
        except PinyonError as error:
            self._failed(node, error, left_s, whole_s)
            return [WriteOutcome.FAILED] * len(objects)

    # -- get

    async def get(
        self, keys: Sequence[BlockKey], region: Region, offsets: Sequence[int], object_bytes: int, timeout_s: float
    ) -> list[bool]:
        """Read object ``keys[i]`` to byte ``offsets[i]`` of ``region``; per key, whether all of it arrived.

        The target of a key that did not arrive holds anything. Takes ``timeout_s`` at most; when it returns or raises
        (cancelled, too), nothing writes to the region any more.

        Raises:
            Unavailable: Redis cannot be asked. A node that fails is a miss.
        """
        deadline = self._clock() + timeout_s
        arrived = [False] * len(keys)
        replicas = await self.metadata.locate(keys, await self.nodes())
        plan = self._sources(replicas, object_bytes)
        async with asyncio.TaskGroup() as group:  # on cancellation it waits until every transfer has let go
            for node, indexes in plan:
                group.create_task(
                    self._read(node, indexes, keys, region, offsets, object_bytes, deadline, timeout_s, arrived)
                )
        return arrived

    def _sources(self, located: Sequence[Sequence[Replica]], object_bytes: int) -> list[tuple[NodeRecord, list[int]]]:
        """Which keys to read where: as few nodes as a greedy choice finds."""
        holders: dict[NodeRecord, set[int]] = {}
        for index, replicas in enumerate(located):
            for node, size in replicas:
                if size == object_bytes:
                    holders.setdefault(node, set()).add(index)
        usable = {node: holders[node] for node in self._usable(list(holders))}
        plan: list[tuple[NodeRecord, list[int]]] = []
        while usable:
            node = max(usable, key=lambda each: (len(usable[each]), each.node_id))
            indexes = usable.pop(node)
            if indexes:
                plan.append((node, sorted(indexes)))
            for others in usable.values():
                others -= indexes
        return plan

    async def _read(
        self,
        node: NodeRecord,
        indexes: list[int],
        keys: Sequence[BlockKey],
        region: Region,
        offsets: Sequence[int],
        object_bytes: int,
        deadline: float,
        whole_s: float,
        arrived: list[bool],
    ) -> None:
        asked_s = self._clock()
        left_s = deadline - asked_s
        if left_s <= 0:
            return  # it is not asked, so nothing is learned about it
        try:
            result = await self._reader.read(
                node.address,
                [keys[index] for index in indexes],
                region,
                [offsets[index] for index in indexes],
                object_bytes,
                left_s,
                allow_gaps=True,
            )
            for index, whole in zip(indexes, result.arrived, strict=True):
                arrived[index] = whole
            result.raise_for_failure()
            if result.worked:
                self._avoidance.succeeded(str(node.life), asked_s)
        except PinyonError as error:
            self._failed(node, error, left_s, whole_s)

    # -- exists, remove

    async def exists(self, keys: Sequence[BlockKey], timeout_s: float = 2.0) -> list[bool]:
        """Per key, whether a live node says it can be read now. Raises :class:`Unavailable` when Redis is."""
        found = [False] * len(keys)
        located = await self.metadata.locate(keys, await self.nodes())
        at: dict[NodeRecord, list[int]] = {}
        for index, replicas in enumerate(located):
            for node, _ in replicas:
                at.setdefault(node, []).append(index)
        for node in self._usable(list(at)):
            try:
                answers = await self._calls.exists(node.address, [keys[index] for index in at[node]], timeout_s)
            except PinyonError as error:
                self._failed(node, error)
                continue
            self._avoidance.succeeded(str(node.life))
            for index, answer in zip(at[node], answers, strict=True):
                found[index] |= answer
        return found

    async def remove(self, keys: Sequence[BlockKey], timeout_s: float = 2.0) -> int:
        """Remove objects on all live nodes; those being read disappear with their last lease. Replicas removed.

        Raises:
            Unavailable: Redis or a node cannot be asked; the other nodes were.
        """
        removed = 0
        missed: list[str] = []
        for node in await self.nodes():
            try:
                removed += await self._calls.remove(node.address, keys, timeout_s)
            except PinyonError as error:
                self._failed(node, error)
                missed.append(node.node_id)
        if missed:
            raise Unavailable(f"store nodes that may still hold them: {', '.join(missed)}")
        return removed

    # -- health

    def _usable(self, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        now = self._clock()
        return [node for node in nodes if not self._avoidance.avoids(str(node.life), now)]

    def _failed(
        self, node: NodeRecord, error: PinyonError, offered_s: float = math.inf, whole_s: float = math.inf
    ) -> None:
        """Leave it alone for a while, unless that was not its fault."""
        if not blames_peer(error, offered_s, whole_s):
            _log.info("store node %s: %s", node.node_id, error.message)
            return
        self._avoidance.failed(str(node.life), self._clock())
        _log.info("store node %s is avoided: %s", node.node_id, error.message)
