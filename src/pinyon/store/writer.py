"""Writes of objects to one store node: PutStart, transfer WRITE, PutEnd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, Unavailable
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.messages.request_class import class_to_proto
from pinyon.messages.segment import segment_from_proto
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended
from pinyon.store.background import Background
from pinyon.store.checksums import all_checksums, in_host_memory
from pinyon.store.kv_memory import Pieces
from pinyon.store.node_channels import NodeChannels
from pinyon.transfer import Opcode, TransferEngine, TransferRequest, TransferResult

ABORT_S = 2.0
"""The seconds after which a PutEnd that gives room back is given up: the put ends by its timeout."""
PUT_SLACK_S = 0.5
"""The seconds by which the node's timeout exceeds ours, so that it does not end a put whose PutEnd is under way."""

_log = get_logger("store")


class PutOutcome(Enum):
    STORED = "stored"
    EXISTS = "exists"
    """The store has the object: nothing was sent."""
    BEING_PUT = "being_put"
    """Another writer is putting the object: nothing was sent, and the store has it only if that ends well."""
    NO_SPACE = "no_space"
    """The nodes tried have no room: all is pinned, or being read or written, or the tenant's quota is full.

    The log says which."""
    FAILED = "failed"
    """Failure: no node could be reached, or the bytes did not arrive in time."""


_REFUSED = {
    kvstore_pb2.PUT_SLOT_STATE_EXISTS: PutOutcome.EXISTS,
    kvstore_pb2.PUT_SLOT_STATE_BEING_PUT: PutOutcome.BEING_PUT,
    kvstore_pb2.PUT_SLOT_STATE_NO_SPACE: PutOutcome.NO_SPACE,
}


class BlockWriter:
    """A writer whose puts are all or nothing: if one object's bytes do not arrive, the others' room is given back."""

    def __init__(self, engine: TransferEngine, channels: NodeChannels, *, clock: Clock = time.monotonic) -> None:
        self._engine = engine
        self._channels = channels
        self._clock = clock
        self._duties = Background()

    async def close(self) -> None:
        await self._duties.close(ABORT_S)

    async def write(
        self,
        address: str,
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        timeout_s: float,
        request_class: RequestClass = UNKNOWN_CLASS,
        places: Sequence[int] = (),
        parts: int = 1,
        checksums: Sequence[bytes] = (),
        copies: bool = False,
    ) -> list[PutOutcome]:
        """Puts up to ``MAX_KEYS`` ``(key, pieces of memory)`` objects; returns one outcome each.

        The blocks' places in their prompts are ``places``, empty if not known. Each object gets a checksum for each of
        its equal ``parts``, which is computed unless the objects' ``checksums`` are given. Nodes put ``copies``.
        When it returns or raises (cancelled, too), the objects' memory is not read any more. Raises Unavailable,
        DeadlineExceeded, … if the node cannot be asked or does not confirm."""
        deadline = self._clock() + timeout_s
        if timeout_s <= 0:
            raise DeadlineExceeded("no time left for the put")
        request = kvstore_pb2.PutStartRequest(
            keys=pack_keys([key for key, _ in objects]),
            object_bytes=object_bytes,
            timeout_ms=round((timeout_s + PUT_SLACK_S) * 1000),
            request_class=class_to_proto(request_class),
            places=places,
            copies=copies,
        )
        reply = await self._duties.answer(
            "put start",
            self._call(address, "PutStart", request, timeout_s),
            "put abort",
            lambda reply: self._abort(address, reply.put_id),
        )
        if reply.no_space:
            _log.info("store node %s has no room: %s", address, reply.no_space)
        confirmed = False
        try:
            requests, outcomes = self._plan(reply, objects, object_bytes)
            left_s = deadline - self._clock()
            if not requests:
                return outcomes
            if left_s <= 0:
                return [PutOutcome.FAILED if each is PutOutcome.STORED else each for each in outcomes]
            stored = [number for number, each in enumerate(outcomes) if each is PutOutcome.STORED]
            if checksums:
                sums: Sequence[bytes | None] = [checksums[number] for number in stored]
                results = await self._engine.transfer_async(requests, left_s, checksum=False)
            else:
                written = [objects[number][1] for number in stored]
                results, sums = await self._move(requests, written, object_bytes, parts, left_s)
            if not all(result.ok for result in results):
                return [PutOutcome.FAILED if each is PutOutcome.STORED else each for each in outcomes]
            ending = kvstore_pb2.PutEndRequest(put_id=reply.put_id, commit=True)
            if None not in sums:  # memory of a device: the node computes them
                ending.checksums, ending.parts = b"".join(filter(None, sums)), parts
            await self._call(address, "PutEnd", ending, max(0.001, deadline - self._clock()))
            confirmed = True
            return outcomes
        finally:
            # A commit that was not confirmed may have taken effect; then the abort comes too late and is refused.
            if reply.put_id and not confirmed:
                self._duties.run(self._abort(address, reply.put_id), "put abort")

    def _plan(
        self, reply: Any, objects: Sequence[tuple[BlockKey, Pieces]], object_bytes: int
    ) -> tuple[list[TransferRequest], list[PutOutcome]]:
        """Returns the WRITEs into the reserved slots, and the outcomes as they will be if all bytes arrive."""
        if len(reply.slots) != len(objects):
            raise Unavailable(f"the node answered for {len(reply.slots)} of {len(objects)} objects")
        requests: list[TransferRequest] = []
        outcomes: list[PutOutcome] = []
        segment = segment_from_proto(reply.segment) if reply.put_id else None
        if segment is not None and not segment.regions:
            raise Unavailable("the node named no region to write to")
        for slot, (_, pieces) in zip(reply.slots, objects, strict=True):
            if slot.state != kvstore_pb2.PUT_SLOT_STATE_RESERVED or segment is None:
                outcomes.append(_REFUSED.get(slot.state, PutOutcome.FAILED))
                continue
            target = segment.regions[0]
            if slot.offset_bytes + object_bytes > target.length:
                raise Unavailable("the node named a place outside its memory")
            there = slot.offset_bytes
            for key, offset, length in pieces:
                requests.append(TransferRequest(Opcode.WRITE, key, offset, segment, target.key, there, length))
                there += length
            outcomes.append(PutOutcome.STORED)
        return requests, outcomes

    async def _move(
        self,
        requests: Sequence[TransferRequest],
        written: Sequence[Pieces],
        object_bytes: int,
        parts: int,
        timeout_s: float,
    ) -> tuple[list[TransferResult], list[bytes | None]]:
        """Moves objects and computes their checksums meanwhile; those of small ones first."""
        view = self._engine.view
        seen = in_host_memory(requests, view)
        moving = asyncio.ensure_future(self._engine.transfer_async(requests, timeout_s, checksum=not seen))
        try:
            sums = await all_checksums(written, [parts] * len(written), object_bytes, view)
        except BaseException:
            await ended(moving)
            raise
        return await moving, sums

    async def _call(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        return await self._channels.call(address, kvstore_pb2_grpc.KvStoreServiceStub, method, request, timeout_s)

    async def _abort(self, address: str, put_id: int) -> None:
        if put_id:
            await self._call(address, "PutEnd", kvstore_pb2.PutEndRequest(put_id=put_id, commit=False), ABORT_S)
