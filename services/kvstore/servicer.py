"""The two gRPC services of a store node: they convert messages to values, ask the node, and convert its answers."""

from __future__ import annotations

from contextlib import aclosing
from math import inf
from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import InvalidArgument
from pinyon.eviction import Use
from pinyon.messages.checks import keys_from_proto
from pinyon.messages.request_class import class_from_proto
from pinyon.messages.segment import region_to_proto, segment_to_proto
from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN, CONDUCTOR, KVSTORE, LB, WORKER
from pinyon.runtime.telemetry import Telemetry
from pinyon.store.kv_object import SlotState
from pinyon.store.reader import MAX_KEYS
from services.kvstore.copier import Copier
from services.kvstore.drain import Drain
from services.kvstore.node import StoreNode

KVSTORE_CALLERS: Callers = {
    "PutStart": frozenset((WORKER, KVSTORE)),
    "PutEnd": frozenset((WORKER, KVSTORE)),
    "Exists": frozenset((WORKER,)),
    "Remove": frozenset((WORKER, ADMIN)),
    "Replicate": frozenset((WORKER, CONDUCTOR, ADMIN)),
    "Drain": frozenset((ADMIN,)),
    "GetNodeStatus": frozenset((LB, WORKER, ADMIN)),
}
MAX_QUERY_KEYS = 65536
"""The maximum number of keys in one Exists or Remove."""
_STATES: dict[SlotState, kvstore_pb2.PutSlotState] = {
    each: getattr(kvstore_pb2, f"PUT_SLOT_STATE_{each.name}") for each in SlotState
}


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """The service for puts, and for questions about the node's objects."""

    def __init__(self, node: StoreNode, copier: Copier, drain: Drain) -> None:
        self._node, self._copier, self._drain = node, copier, drain
        self._host = segment_to_proto(node.segment)

    async def PutStart(self, request: kvstore_pb2.PutStartRequest, context: Any) -> kvstore_pb2.PutStartResponse:
        keys = keys_from_proto(request.keys, MAX_KEYS)
        places = request.places
        if places and len(places) != len(keys):
            raise InvalidArgument(f"{len(places)} places for {len(keys)} keys", field="places")
        request_class = class_from_proto(request.request_class)
        put_id, slots, opened = self._node.put_start(
            keys, request.object_bytes, request.timeout_ms / 1000, request_class, places
        )
        if request.copies:
            self._node.note_copies(keys)
        reply = kvstore_pb2.PutStartResponse(
            put_id=put_id,
            slots=[kvstore_pb2.PutSlot(state=_STATES[slot.state], offset_bytes=slot.offset) for slot in slots],
        )
        if any(slot.state is SlotState.NO_SPACE for slot in slots):
            reply.no_space = self._node.why_no_space(request_class.tenant, request.object_bytes)
        if opened is not None:
            reply.segment.CopyFrom(self._host)
            reply.segment.regions.append(region_to_proto(opened))
        return reply

    async def PutEnd(self, request: kvstore_pb2.PutEndRequest, context: Any) -> kvstore_pb2.PutEndResponse:
        committed = await self._node.put_end(
            request.put_id, commit=request.commit, checksums=request.checksums, parts=request.parts or 1
        )
        return kvstore_pb2.PutEndResponse(committed=committed)

    async def Exists(self, request: kvstore_pb2.ExistsRequest, context: Any) -> kvstore_pb2.ExistsResponse:
        return kvstore_pb2.ExistsResponse(exists=self._node.table.exists(keys_from_proto(request.keys, MAX_QUERY_KEYS)))

    async def Remove(self, request: kvstore_pb2.RemoveRequest, context: Any) -> kvstore_pb2.RemoveResponse:
        return kvstore_pb2.RemoveResponse(removed=await self._node.drop(keys_from_proto(request.keys, MAX_QUERY_KEYS)))

    async def Replicate(self, request: kvstore_pb2.ReplicateRequest, context: Any) -> kvstore_pb2.ReplicateResponse:
        keys = keys_from_proto(request.keys, MAX_KEYS)
        copied = await self._copier.replicate(keys, request.target, request.timeout_ms / 1000)
        return kvstore_pb2.ReplicateResponse(copied=copied)

    async def Drain(self, request: kvstore_pb2.DrainRequest, context: Any) -> None:
        """Writes messages itself instead of yielding them, so that a cancel arrives in this method."""
        async with aclosing(self._drain.run()) as run:
            async for each in run:
                await context.write(
                    kvstore_pb2.DrainResponse(
                        copied=each.copied,
                        copied_bytes=each.copied_bytes,
                        seen=each.seen,
                        objects=each.objects,
                        lost=each.lost,
                    )
                )

    async def GetNodeStatus(
        self, request: kvstore_pb2.GetNodeStatusRequest, context: Any
    ) -> kvstore_pb2.GetNodeStatusResponse:
        table = self._node.table
        return kvstore_pb2.GetNodeStatusResponse(
            node_id=self._node.node_id,
            boot_id=self._node.boot_id,
            capacity_bytes=table.capacity_bytes,
            used_bytes=table.used_bytes,
            objects=len(table),
            leases=table.leases,
            open_puts=table.open_puts,
        )


class StoredBlockServicer(kvstore_pb2_grpc.BlockReadServiceServicer):
    """The service for leases."""

    def __init__(self, node: StoreNode, telemetry: Telemetry) -> None:
        self._node = node
        self._telemetry = telemetry
        self._host = segment_to_proto(node.segment)

    async def Acquire(self, request: kvstore_pb2.AcquireRequest, context: Any) -> kvstore_pb2.AcquireResponse:
        keys = keys_from_proto(request.keys, MAX_KEYS)
        request_class = class_from_proto(request.request_class)
        with self._telemetry.span("kvstore.acquire", request.traceparent, request_id=request.request_id) as span:
            span.classify(request_class)
            use = Use.of(request_class, request.first_block)
            left_s = context.time_remaining()
            lease, lease_s, opened = await self._node.acquire(
                keys,
                request.lease_ms / 1000,
                allow_gaps=request.allow_gaps,
                use=use,
                patience_s=inf if left_s is None else left_s / 2,
            )
            span.set("blocks", len(lease.blocks))
        reply = kvstore_pb2.AcquireResponse(
            lease_id=lease.lease_id,
            lease_ms=int(lease_s * 1000),
            blocks=[
                kvstore_pb2.BlockLocation(
                    index=index, offset_bytes=held.offset, length_bytes=held.size, checksums=held.checksums
                )
                for index, held in lease.blocks
            ],
        )
        if opened is not None:
            reply.segment.CopyFrom(self._host)
            reply.segment.regions.append(region_to_proto(opened))
        return reply

    async def Renew(self, request: kvstore_pb2.RenewRequest, context: Any) -> kvstore_pb2.RenewResponse:
        lease_s = self._node.renew(request.lease_id, request.lease_ms / 1000)
        return kvstore_pb2.RenewResponse(lease_ms=int(lease_s * 1000))

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        return kvstore_pb2.ReleaseResponse(released=self._node.release(request.lease_id, request.corrupt))
