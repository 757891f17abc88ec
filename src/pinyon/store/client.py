"""The KV store as its users see it: put and look-up by block key (Mooncake §3.2.2).

A block's place is looked up in Redis, and a :class:`pinyon.store.reader.BlockReader` reads the block. Rendezvous
hashing over the live nodes chooses a new run's node. After a failure, a node or Redis is left alone for a growing
pause. The store is a cache, so a block that cannot be read is a miss."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, PinyonError, Unavailable
from pinyon.core.orders import FETCH_SPANS_MAX
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.store.copies import COPIES_MAX, CopyPlan, plan_copies
from pinyon.store.directory import BlockDirectory
from pinyon.store.kv_memory import KvMemory, Pieces
from pinyon.store.kv_object import PARTS_MAX
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import MAX_KEYS, WHOLE, BlockReader, PartRange, ReadTerms, objects_at_once
from pinyon.store.records import NodeRecord, Replica
from pinyon.store.runs import Run, choose_nodes, leading_runs
from pinyon.store.writer import BlockWriter, PutOutcome
from pinyon.transfer import Access, TransferEngine

GET_ATTEMPTS = 2
"""The largest number of copies of one object that are read, one after the other."""
PUT_ATTEMPTS = 2
"""The largest number of nodes that are tried for one object."""
COPY_KEYS = 512
"""The largest number of keys that a node is asked to copy at once."""
LOOK_KEYS = 512
"""The number of keys looked up first; if all of these are stored, the others follow at once."""

_NO_ENGINE = "this client has no transfer engine: it only looks up"

_log = get_logger("store")


class CopiesChanged(NamedTuple):
    """The numbers of copies that were made, that could not be made, and that were removed."""

    made: int
    missing: int
    removed: int


class StoreClient:
    """A client of the KV store, one per process, on one event loop. It closes ``metadata``, but not the channels."""

    def __init__(
        self,
        engine: TransferEngine | None,
        metadata: StoreMetadata,
        channels: NodeChannels,
        *,
        host: str = "",
        zone: str = "",
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Takes the ``engine``, without which nothing is put, and the ``host`` and ``zone`` whose nodes are near."""
        self.metadata = metadata
        self._channels = channels
        self._host, self._zone = host, zone
        self._rng = rng or random.Random()  # no secret
        self._directory = BlockDirectory(metadata, clock)
        self._writer = None if engine is None else BlockWriter(engine, channels, clock=clock)
        self._reader = None if engine is None else BlockReader(engine, channels, clock=clock)
        self._engine = engine
        self._clock = clock
        self._avoidance = Avoidance()

    @property
    def losses(self) -> int:
        """The number of times that a call found nodes gone, with all that they held."""
        return self._directory.losses

    async def close(self) -> None:
        """Waits (bounded) for puts and leases that are being given back, then leaves Redis."""
        if self._writer is not None:
            await self._writer.close()
        if self._reader is not None:
            await self._reader.close()
        await self.metadata.close()

    async def nodes(self) -> list[NodeRecord]:
        """Returns the live nodes, by id; kept for half a second. Raises :class:`Unavailable` if Redis is."""
        return await self._directory.nodes()

    @property
    def reader(self) -> BlockReader:
        """The reader of this client. Raises :class:`FailedPrecondition` if it has no transfer engine."""
        if self._reader is None:
            raise FailedPrecondition(_NO_ENGINE)
        return self._reader

    def register(self, buffer: object, object_bytes: int) -> KvMemory:
        """Registers a buffer, or a tensor, as slots of ``object_bytes`` each; slot ``i`` is ``pieces(i)``.

        It stays registered as long as the transfer engine runs. Raises :class:`InvalidTransfer` for memory that cannot
        be used."""
        if self._engine is None:
            raise FailedPrecondition(_NO_ENGINE)
        return KvMemory.whole(self._engine.register_local_memory(buffer, access=Access.NONE), object_bytes)

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
        parts: int = 1,
        replicas: int = 1,
    ) -> tuple[PutOutcome, ...]:
        """Stores those ``(key, pieces of memory)`` objects of ``object_bytes`` each that the store lacks.

        ``runs`` names each object's run. Objects of one run go to one node as long as it takes them, in this put and in
        later ones, because runs are read as a whole. By default, the objects of one call are one run. ``request_class``
        is the class of the request for which they were computed; ``places`` are the blocks' places in its prompt (by
        default its beginning). Objects whose equal ``parts`` are to be read alone get a checksum for each. An object
        that is put gets up to ``replicas`` copies, if there is time and room for them. Returns one outcome per object,
        in order.

        Takes at most ``timeout_s``, of which each of the nodes tried gets its share. When it returns or raises
        (cancelled, too), the memory is not read any more. Raises Unavailable if Redis cannot be asked, and
        InvalidArgument for what makes no sense; the failure of a single object is its outcome, not an error."""
        if self._writer is None:
            raise FailedPrecondition(_NO_ENGINE)
        if object_bytes <= 0 or timeout_s <= 0:
            raise InvalidArgument("object_bytes and timeout_s must be positive", field="object_bytes")
        if not 0 < parts <= PARTS_MAX or object_bytes % parts:
            raise InvalidArgument(f"{object_bytes} bytes do not have {parts} equal parts", field="parts")
        if not objects:
            return ()
        if runs is None:
            runs = [Run()] * len(objects)
        if places is None:
            places = range(len(objects))
        if not len(runs) == len(places) == len(objects):
            raise InvalidArgument("one run and one place per object are needed", field="runs")
        deadline = self._clock() + timeout_s
        keys = [key for key, _ in objects]
        nodes, located = await self._directory.locate(keys, timeout_s)
        outcomes = [PutOutcome.EXISTS] * len(objects)
        wanted: dict[BlockKey, int] = {}
        for index, (key, held) in enumerate(zip(keys, located, strict=True)):
            if not any(replica.size_bytes == object_bytes for replica in held):
                wanted.setdefault(key, index)
        usable = {node.node_id: node for node in self._usable(nodes) if not node.room.leaving}
        missing = ((key, runs[index]) for key, index in wanted.items())
        choices = choose_nodes(missing, usable, PUT_ATTEMPTS, object_bytes)
        where: dict[int, str] = {}
        left = list(wanted.values())
        for index in left:
            outcomes[index] = PutOutcome.FAILED
        for tries in range(min(PUT_ATTEMPTS, len(usable)), 0, -1):
            at: dict[str, list[int]] = {}
            for index in left:
                where[index] = choices[runs[index]][-tries]
                at.setdefault(where[index], []).append(index)
            now_s = self._clock()
            # A node that hangs leaves the next node its share of the time.
            until_s = now_s + (deadline - now_s) / tries
            async with asyncio.TaskGroup() as group:  # when cancelled, it waits until every transfer has let go
                for node_id, indexes in at.items():
                    node, rest = usable[node_id], (request_class, places, parts, outcomes)
                    group.create_task(self._write(node, indexes, objects, object_bytes, until_s, timeout_s, *rest))
            left = [index for index in left if outcomes[index] in (PutOutcome.FAILED, PutOutcome.NO_SPACE)]
        if replicas > 1:
            stored = [index for index in where if outcomes[index] is PutOutcome.STORED]
            holders = [[where[index]] for index in stored]
            plan = plan_copies([keys[index] for index in stored], holders, list(usable.values()), replicas)
            await self._copy(plan, usable, deadline)
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
        parts: int,
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
                assert self._writer is not None
                written = await self._writer.write(
                    node.address,
                    [objects[index] for index in part],
                    object_bytes,
                    left_s,
                    request_class,
                    [places[index] for index in part],
                    parts,
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

    # -- copies

    async def change_replica(self, keys: Sequence[BlockKey], copies: int, timeout_s: float) -> CopiesChanged:
        """Gives each of the blocks that the store has so many ``copies``, as far as there are nodes and room for them.

        Surplus copies are removed. Raises :class:`Unavailable` if Redis is, and the error of a node that cannot be
        asked to remove copies: then some may be left."""
        if not 1 <= copies <= COPIES_MAX:
            raise InvalidArgument(f"a block has 1 to {COPIES_MAX} copies", field="copies")
        deadline = self._clock() + timeout_s
        nodes, located = await self._directory.locate(keys, timeout_s)
        usable = {node.node_id: node for node in self._usable(nodes) if not node.room.leaving}
        holders = [[each.node.node_id for each in replicas] for replicas in located]
        plan = plan_copies(keys, holders, list(usable.values()), copies)
        made, removed = await self._copy(plan, usable, deadline), 0
        for node_id, surplus in plan.remove.items():
            removed += await self._remove(usable[node_id], surplus, deadline)
        return CopiesChanged(made, sum(map(len, plan.make.values())) - made, removed)

    async def _copy(self, plan: CopyPlan, nodes: dict[str, NodeRecord], deadline: float) -> int:
        """Has copies made, as far as that works; returns how many were."""

        async def copy(source: str, target: str, keys: Sequence[BlockKey]) -> int:
            made = 0
            for start in range(0, len(keys), COPY_KEYS):
                left_s = max(0.001, deadline - self._clock())
                request = kvstore_pb2.ReplicateRequest(
                    keys=pack_keys(keys[start : start + COPY_KEYS]), target=target, timeout_ms=round(left_s * 1000)
                )
                try:
                    made += (await self._ask(nodes[source], "Replicate", request, deadline)).copied
                except PinyonError as error:
                    _log.info("store node %s made no copies: %s", source, error.message)
                    break
            return made

        return sum(await asyncio.gather(*(copy(*pair, keys) for pair, keys in plan.make.items())))

    async def _ask(self, node: NodeRecord, method: str, request: Any, deadline: float) -> Any:
        stub, left_s = kvstore_pb2_grpc.KvStoreServiceStub, max(0.001, deadline - self._clock())
        return await self._channels.call(node.address, stub, method, request, left_s)

    # -- look-up

    async def leading(
        self, keys: Sequence[BlockKey], object_bytes: int, timeout_s: float, without: Collection[str] = ()
    ) -> list[tuple[NodeRecord, int]]:
        """Returns the nodes that list the first keys without a gap, in order, each with its number of consecutive keys.

        Of several copies, one on the own host is named, else one in the own zone. Among equals it is one at a node from
        which this process reads least. Nodes at the addresses ``without`` are left out. Nothing is leased, so a later
        read may find less. Raises :class:`Unavailable` if Redis is."""
        deadline = self._clock() + timeout_s
        holders: list[set[NodeRecord]] = []
        while (at := len(holders)) < len(keys):
            part = keys[at:] if at else keys[:LOOK_KEYS]
            try:
                _, located = await self._directory.locate(part, deadline - self._clock())
            except Unavailable:
                if not holders:
                    raise
                break  # what was found is of use
            known = {each.node for replicas in located for each in replicas if each.node.address not in without}
            usable = set(self._usable(list(known)))
            holders += [{each.node for each in found if each.size_bytes == object_bytes} & usable for found in located]
            if not all(holders[at:]):
                break
        return leading_runs(holders, FETCH_SPANS_MAX, self._cost(set(chain.from_iterable(holders))))

    def _cost(self, nodes: Collection[NodeRecord]) -> Callable[[NodeRecord], Any]:
        """Returns a key that orders these nodes as sources: the near ones first, then those that are read least."""
        draws = {node: self._rng.random() for node in nodes}

        def cost(node: NodeRecord) -> tuple[int, int, float]:
            if self._host and node.address.rpartition(":")[0] == self._host:
                away = 0
            else:
                away = 1 if self._zone and node.zone == self._zone else 2
            return away, self._channels.reads[node.address], draws[node]

        return cost

    async def locate(self, keys: Sequence[BlockKey], timeout_s: float) -> list[list[Replica]]:
        """Returns each key's copies on live nodes: node, size in bytes and tier. Raises Unavailable if Redis is."""
        _, located = await self._directory.locate(keys, timeout_s)
        return located

    async def exists(self, keys: Sequence[BlockKey], object_bytes: int, timeout_s: float) -> list[bool]:
        """Returns for each key whether an object of this size is listed; nothing is leased, so it may go.

        Raises :class:`Unavailable` if Redis is."""
        located = await self.locate(keys, timeout_s)
        return [any(each.size_bytes == object_bytes for each in found) for found in located]

    async def remove(self, keys: Sequence[BlockKey], timeout_s: float) -> int:
        """Removes all copies of these objects, and returns how many there were.

        A copy that is being read is found by nobody else any more. Raises the error of a node (or Redis) that cannot be
        asked: then some copies may be left."""
        deadline, removed = self._clock() + timeout_s, 0
        for node in await self.nodes():
            removed += await self._remove(node, keys, deadline)
        return removed

    async def _remove(self, node: NodeRecord, keys: Sequence[BlockKey], deadline: float) -> int:
        removed = 0
        for start in range(0, len(keys), MAX_KEYS):
            request = kvstore_pb2.RemoveRequest(keys=pack_keys(keys[start : start + MAX_KEYS]))
            removed += (await self._ask(node, "Remove", request, deadline)).removed
        return removed

    # -- get

    async def get(
        self,
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        timeout_s: float,
        *,
        parts: PartRange = WHOLE,
        leading: bool = False,
        terms: ReadTerms = ReadTerms(),  # noqa: B008  # a value
    ) -> list[bool]:
        """Reads ``(key, pieces of memory)`` objects of ``object_bytes`` each, and returns for each whether it arrived.

        Of objects that were put with ``parts``, a range of these may be read alone; then the pieces have its bytes, and
        ``object_bytes`` are still those of the whole. With ``leading``, nothing behind the first object that the store
        does not list is read. All pieces are registered memory, in as many ranges for each object.

        What arrives has the checksums that it was put with. Where an object did not arrive, the memory may hold
        anything. When this returns or raises (cancelled, too), nothing writes there any more. Takes at most
        ``timeout_s`` seconds. A node that fails is a miss, or another copy is read. Raises Unavailable if Redis cannot
        be asked, and :class:`InvalidArgument` for parts that there cannot be."""
        first, number, of = parts
        block_bytes, rest = divmod(object_bytes * number, max(1, of))
        if rest or not 0 <= first < first + number <= of or block_bytes <= 0 or timeout_s <= 0:
            raise InvalidArgument(f"no {number} of {of} parts of {object_bytes} bytes in {timeout_s} s", field="parts")

        async def read(node: NodeRecord, indexes: Sequence[int], until_s: float) -> None:
            """Reads objects of one node, also behind those that it has no more."""
            while indexes and (left_s := until_s - (asked_s := self._clock())) > 0:
                keys, places = zip(*[objects[index] for index in indexes], strict=True)
                about = replace(terms, first_block=terms.first_block + indexes[0])
                asked = node.address, keys, places, block_bytes, left_s
                try:
                    got = await self.reader.read(*asked, terms=about, parts=parts)
                    for index in indexes[: got.leading]:
                        arrived[index] = True
                    got.raise_for_failure()
                except PinyonError as error:
                    self._failed(node, error, left_s, timeout_s)
                    return
                if got.worked is None:
                    return
                if got.leading:
                    self._avoidance.succeeded(str(node.life), asked_s)
                indexes = indexes[got.leading + 1 :]

        deadline, arrived = self._clock() + timeout_s, [False] * len(objects)
        located = await self.locate([key for key, _ in objects], timeout_s)
        for tries in range(GET_ATTEMPTS, 0, -1):
            usable = set(self._usable(list({each.node for found in located for each in found})))
            at, cost = dict[NodeRecord, list[int]](), self._cost(usable)
            for index in range(len(objects)):
                if arrived[index]:
                    continue
                holders = [o.node for o in located[index] if o.size_bytes == object_bytes and o.node in usable]
                if holders:
                    node = min(holders, key=cost)
                    located[index] = [each for each in located[index] if each.node != node]
                    at.setdefault(node, []).append(index)
                elif leading:
                    break
            now_s = self._clock()
            until_s = now_s + (deadline - now_s) / tries
            async with asyncio.TaskGroup() as group:  # when cancelled, it waits until every transfer has let go
                for node, indexes in at.items():
                    group.create_task(read(node, indexes, until_s))
            if all(arrived[index] for indexes in at.values() for index in indexes):
                break
        return arrived

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
