"""The KV store as its users see it: put and look-up by block key (Mooncake §3.2.2).

A block's place is looked up in Redis, and a :class:`pinyon.store.reader.BlockReader` reads the block. Rendezvous
hashing over the live nodes chooses a new run's node. After a failure, a node or Redis is left alone for a growing
pause. The store is a cache, so a block that cannot be read is a miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, InvalidArgument, PinyonError
from pinyon.core.orders import FETCH_SPANS_MAX
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.store.directory import BlockDirectory
from pinyon.store.kv_memory import Pieces
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import objects_at_once
from pinyon.store.records import NodeRecord
from pinyon.store.runs import Run, choose_nodes, leading_runs
from pinyon.store.writer import BlockWriter, PutOutcome
from pinyon.transfer import TransferEngine

PUT_ATTEMPTS = 2
"""The largest number of nodes that are tried for one object."""
LOOK_KEYS = 512
"""The number of keys looked up at once where mostly only some of the first ones are stored."""

_log = get_logger("store")


class StoreClient:
    """A client of the KV store, one per process, on one event loop. It closes ``metadata``, but not the channels."""

    def __init__(
        self, engine: TransferEngine, metadata: StoreMetadata, channels: NodeChannels, *, clock: Clock = time.monotonic
    ) -> None:
        self.metadata = metadata
        self._directory = BlockDirectory(metadata, clock)
        self._writer = BlockWriter(engine, channels, clock=clock)
        self._clock = clock
        self._avoidance = Avoidance()

    @property
    def losses(self) -> int:
        """The number of times that a call found nodes gone, with all that they held."""
        return self._directory.losses

    async def close(self) -> None:
        """Waits (bounded) for puts that are being given back, then leaves Redis."""
        await self._writer.close()
        await self.metadata.close()

    async def nodes(self) -> list[NodeRecord]:
        """Returns the live nodes, by id; kept for half a second. Raises :class:`Unavailable` if Redis is."""
        return await self._directory.nodes()

    # -- put

    async def put(
        self,
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        timeout_s: float,
        *,
        runs: Sequence[Run] | None = None,
        request_class: RequestClass = UNKNOWN_CLASS,
        places: Sequence[int] | None = None,
    ) -> tuple[PutOutcome, ...]:
        """Stores those ``(key, pieces of memory)`` objects of ``object_bytes`` each that the store lacks.

        ``runs`` names each object's run. Objects of one run go to one node as long as it takes them, in this put and in
        later ones, because runs are read as a whole. By default, the objects of one call are one run. ``request_class``
        is the class of the request for which they were computed; ``places`` are the blocks' places in its prompt (by
        default its beginning). Returns one outcome per object, in order.

        Takes at most ``timeout_s``, of which each of the nodes tried gets its share. When it returns or raises
        (cancelled, too), the memory is not read any more. Raises Unavailable if Redis cannot be asked; the failure of a
        single object is its outcome, not an error."""
        if object_bytes <= 0 or timeout_s <= 0:
            raise InvalidArgument("object_bytes and timeout_s must be positive", field="object_bytes")
        if not objects:
            return ()
        if runs is None:
            runs = [Run()] * len(objects)
        if places is None:
            places = range(len(objects))
        deadline = self._clock() + timeout_s
        keys = [key for key, _ in objects]
        nodes, located = await self._directory.locate(keys, timeout_s)
        outcomes = [PutOutcome.EXISTS] * len(objects)
        wanted: dict[BlockKey, int] = {}
        for index, (key, replicas) in enumerate(zip(keys, located, strict=True)):
            if not any(replica.size_bytes == object_bytes for replica in replicas):
                wanted.setdefault(key, index)
        usable = {node.node_id: node for node in self._usable(nodes)}
        weights = {node_id: float(max(1, node.capacity_bytes)) for node_id, node in usable.items()}
        choices = choose_nodes(((key, runs[index]) for key, index in wanted.items()), weights, PUT_ATTEMPTS)
        left = list(wanted.values())
        for index in left:
            outcomes[index] = PutOutcome.FAILED
        for tries in range(min(PUT_ATTEMPTS, len(usable)), 0, -1):
            at: dict[str, list[int]] = {}
            for index in left:
                at.setdefault(choices[runs[index]][-tries], []).append(index)
            now_s = self._clock()
            # A node that hangs leaves the next node its share of the time.
            until_s = now_s + (deadline - now_s) / tries
            async with asyncio.TaskGroup() as group:  # when cancelled, it waits until every transfer has let go
                for node_id, indexes in at.items():
                    node, rest = usable[node_id], (request_class, places, outcomes)
                    group.create_task(self._write(node, indexes, objects, object_bytes, until_s, timeout_s, *rest))
            left = [index for index in left if outcomes[index] in (PutOutcome.FAILED, PutOutcome.NO_SPACE)]
        for index, key in enumerate(keys):  # repeated keys share the outcome of the first
            if (first := wanted.get(key, index)) != index and outcomes[first] is not PutOutcome.STORED:
                outcomes[index] = outcomes[first]
        return tuple(outcomes)

    async def _write(
        self,
        node: NodeRecord,
        indexes: Sequence[int],
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        until_s: float,
        whole_s: float,
        request_class: RequestClass,
        places: Sequence[int],
        outcomes: list[PutOutcome],
    ) -> None:
        """Puts objects to one node until ``until_s`` by the clock; the caller gave ``whole_s`` for all nodes."""
        at_once = objects_at_once(objects[indexes[0]][1])
        for start in range(0, len(indexes), at_once):
            part = indexes[start : start + at_once]
            asked_s = self._clock()
            left_s = until_s - asked_s
            if left_s <= 0:
                return  # the node is not asked, so nothing is learned about it
            try:
                written = await self._writer.write(
                    node.address,
                    [objects[index] for index in part],
                    object_bytes,
                    left_s,
                    request_class,
                    [places[index] for index in part],
                )
            except PinyonError as error:
                self._failed(node, error, left_s, whole_s)
                return
            if PutOutcome.FAILED in written:
                self._failed(node, DeadlineExceeded("the bytes did not arrive"), left_s, whole_s)
            else:
                self._avoidance.succeeded(str(node.life), asked_s)
            for index, outcome in zip(part, written, strict=True):
                outcomes[index] = outcome

    # -- look-up

    async def leading(
        self, keys: Sequence[BlockKey], object_bytes: int, timeout_s: float
    ) -> list[tuple[NodeRecord, int]]:
        """Returns the nodes that list the first keys without a gap, in order, each with its number of consecutive keys.

        Nothing is leased, so a later read may find less. Raises :class:`Unavailable` if Redis is."""
        deadline = self._clock() + timeout_s
        holders: list[set[NodeRecord]] = []
        while (at := len(holders)) < len(keys):
            part = keys[at : at + LOOK_KEYS]
            _, located = await self._directory.locate(part, deadline - self._clock())
            usable = set(self._usable(list({node for replicas in located for node, _ in replicas})))
            holders += [{node for node, size in found if size == object_bytes} & usable for found in located]
            if not all(holders[at:]):
                break
        return leading_runs(holders, FETCH_SPANS_MAX)

    # -- health

    def _usable(self, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        now = self._clock()
        return [node for node in nodes if not self._avoidance.avoids(str(node.life), now)]

    def _failed(self, node: NodeRecord, error: PinyonError, offered_s: float, whole_s: float) -> None:
        """Leaves the node alone for a while, unless the failure was not its fault."""
        if not blames_peer(error, offered_s, whole_s):
            _log.info("store node %s: %s", node.node_id, error.message)
            return
        self._avoidance.failed(str(node.life), self._clock())
        _log.info("store node %s is avoided: %s", node.node_id, error.message)
