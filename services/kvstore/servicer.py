"""The two gRPC services of a store node: they convert messages to values, ask the node, and convert its answers."""

from __future__ import annotations

from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import InvalidArgument
from pinyon.eviction import Use
from pinyon.messages.checks import keys_from_proto
from pinyon.messages.request_class import class_from_proto
from pinyon.messages.segment import region_to_proto, segment_to_proto
from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN, LB, WORKER
from pinyon.runtime.telemetry import Telemetry
from pinyon.store.kv_object import SlotState
from pinyon.store.reader import MAX_KEYS
from services.kvstore.node import StoreNode

KVSTORE_CALLERS: Callers = {
    "PutStart": frozenset((WORKER,)),
    "PutEnd": frozenset((WORKER,)),
    "Exists": frozenset((WORKER,)),
    "Remove": frozenset((WORKER, ADMIN)),
    "GetNodeStatus": frozenset((LB, WORKER, ADMIN)),
}
MAX_QUERY_KEYS = 65536
"""The maximum number of keys in one Exists or Remove."""
_STATES: dict[SlotState, kvstore_pb2.PutSlotState] = {
    each: getattr(kvstore_pb2, f"PUT_SLOT_STATE_{each.name}") for each in SlotState
}


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """The service for puts, and for questions about the node's objects."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._host = segment_to_proto(node.segment)

    async def PutStart(self, request: kvstore_pb2.PutStartRequest, context: Any) -> kvstore_pb2.PutStartResponse:
        keys = keys_from_proto(request.keys, MAX_KEYS)
        places = request.places
        if places and len(places) != len(keys):
            raise InvalidArgument(f"{len(places)} places for {len(keys)} keys", field="places")
        put_id, slots, opened = self._node.put_start(
            keys, request.object_bytes, request.timeout_ms / 1000, class_from_proto(request.request_class), places
        )
        reply = kvstore_pb2.PutStartResponse(
            put_id=put_id,
            slots=[kvstore_pb2.PutSlot(state=_STATES[slot.state], offset_bytes=slot.offset) for slot in slots],
        )
        if opened is not None:
            reply.segment.CopyFrom(self._host)
            reply.segment.regions.append(region_to_proto(opened))
        return reply

    async def PutEnd(self, request: kvstore_pb2.PutEndRequest, context: Any) -> kvstore_pb2.PutEndResponse:
        return kvstore_pb2.PutEndResponse(committed=await self._node.put_end(request.put_id, commit=request.commit))

    async def Exists(self, request: kvstore_pb2.ExistsRequest, context: Any) -> kvstore_pb2.ExistsResponse:
        return kvstore_pb2.ExistsResponse(exists=self._node.table.exists(keys_from_proto(request.keys, MAX_QUERY_KEYS)))

    async def Remove(self, request: kvstore_pb2.RemoveRequest, context: Any) -> kvstore_pb2.RemoveResponse:
        return kvstore_pb2.RemoveResponse(removed=self._node.remove(keys_from_proto(request.keys, MAX_QUERY_KEYS)))

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
            lease, lease_s, opened = self._node.acquire(
                keys, request.lease_ms / 1000, allow_gaps=request.allow_gaps, use=use
            )
            span.set("blocks", len(lease.blocks))
        reply = kvstore_pb2.AcquireResponse(
            lease_id=lease.lease_id,
            lease_ms=int(lease_s * 1000),
            blocks=[
                kvstore_pb2.BlockLocation(index=index, offset_bytes=held.offset, length_bytes=held.size)
                for index, held in lease.blocks
            ],
        )
        if opened is not None:
            reply.segment.CopyFrom(self._host)
            reply.segment.regions.append(region_to_proto(opened))
        return reply

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        return kvstore_pb2.ReleaseResponse(released=self._node.release(request.lease_id))
