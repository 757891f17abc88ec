"""The ``BlockReadService``: peers read complete blocks of this worker, under leases."""

from __future__ import annotations

from typing import Any

from pinyon.api.common.v1 import common_pb2
from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.eviction import Use
from pinyon.messages.checks import keys_from_proto
from pinyon.messages.request_class import class_from_proto
from pinyon.messages.segment import region_to_proto
from pinyon.runtime.telemetry import Telemetry
from pinyon.store.reader import MAX_KEYS
from services.worker.kv.cache import KvCache
from services.worker.orders.limits import WorkerLimits


class CachedBlockServicer:
    """The ``pinyon.api.kvstore.v1.BlockReadService`` over the cache; ``host`` is the segment of its memory."""

    def __init__(self, cache: KvCache, host: common_pb2.Segment, limits: WorkerLimits, telemetry: Telemetry) -> None:
        self._cache = cache
        self._host = host
        self._limits = limits
        self._telemetry = telemetry

    async def Acquire(self, request: kvstore_pb2.AcquireRequest, context: Any) -> kvstore_pb2.AcquireResponse:
        keys = keys_from_proto(request.keys, MAX_KEYS)
        request_class = class_from_proto(request.request_class)
        lease_s = self._lease_s(request.lease_ms)
        with self._telemetry.span("acquire", request.traceparent, request_id=request.request_id) as span:
            span.classify(request_class)
            lease_id, held, opened = self._cache.lease(
                keys, lease_s, allow_gaps=request.allow_gaps, use=Use.of(request_class, request.first_block)
            )
            span.set("blocks", len(held))
            try:
                await self._cache.settled([block for _, block in held])
            except BaseException:
                self._cache.end_lease(lease_id)
                raise
        size = self._cache.layout.block_bytes
        reply = kvstore_pb2.AcquireResponse(
            lease_id=lease_id,
            lease_ms=round(1000 * lease_s),
            blocks=[
                kvstore_pb2.BlockLocation(index=index, offset_bytes=block * size, length_bytes=size)
                for index, block in held
            ],
        )
        if opened is not None:
            reply.segment.CopyFrom(self._host)
            reply.segment.regions.append(region_to_proto(opened))
        return reply

    def _lease_s(self, asked_ms: int) -> float:
        return min(asked_ms / 1000 if asked_ms else self._limits.lease_s, self._limits.max_lease_s)

    async def Renew(self, request: kvstore_pb2.RenewRequest, context: Any) -> kvstore_pb2.RenewResponse:
        lease_s = self._lease_s(request.lease_ms)
        renewed = self._cache.renew_lease(request.lease_id, lease_s)
        return kvstore_pb2.RenewResponse(lease_ms=int(1000 * lease_s) if renewed else 0)

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        return kvstore_pb2.ReleaseResponse(released=self._cache.end_lease(request.lease_id))
