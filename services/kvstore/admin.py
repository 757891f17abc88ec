"""The gRPC service by which administrators look into a store node and change what it holds: ``pinyon kv``."""

from __future__ import annotations

import asyncio
import time
from math import isfinite
from typing import Any

from pinyon.api.kvstore.v1 import admin_pb2, admin_pb2_grpc
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.core.errors import InvalidArgument
from pinyon.messages.checks import keys_from_proto
from pinyon.runtime.admin import admitted
from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN
from pinyon.runtime.logging import get_logger
from pinyon.store.kv_object import KvObject
from pinyon.store.listing import page_of, with_disk
from pinyon.store.reader import MAX_KEYS
from services.kvstore.node import StoreNode

STORE_ADMIN_CALLERS: Callers = dict.fromkeys(("ListObjects", "Stat", "Pin", "Unpin", "Evict"), frozenset((ADMIN,)))
PAGE, PAGE_MAX = 256, 1024
"""The objects of a page when the caller does not say, and at most."""

_log = get_logger("admin")


class StoreAdminServicer(admin_pb2_grpc.StoreAdminServiceServicer):
    """The service. Whoever changes something is logged."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node

    async def ListObjects(self, request: admin_pb2.ListObjectsRequest, context: Any) -> admin_pb2.ListObjectsResponse:
        limit = request.limit or PAGE
        if limit > PAGE_MAX:
            raise InvalidArgument(f"a page has at most {PAGE_MAX} objects", field="limit")
        found = await self._found(request)
        page, token = await asyncio.to_thread(page_of, found, limit, request.page_token, largest=request.largest)
        now_s, size = time.monotonic(), sum([each.size for each in found])
        objects = [_object_to_proto(each, now_s, each.key in self._node.table.pinned) for each in page]
        return admin_pb2.ListObjectsResponse(
            objects=objects, next_page_token=token, total_objects=len(found), total_bytes=size
        )

    async def _found(self, request: Any) -> list[KvObject]:
        """Returns the objects of the request's keys, or all; those of its tenant, if it names one."""
        memory, disk = self._node.table.snapshot(_keys(request) if request.keys else None)
        found = await asyncio.to_thread(with_disk, memory, disk)  # there may be a million
        return [o for o in found if not request.HasField("tenant") or o.traits.tenant == request.tenant]

    async def Stat(self, request: admin_pb2.StatRequest, context: Any) -> admin_pb2.StatResponse:
        node, table, tier = self._node, self._node.table, self._node.tier
        reply = admin_pb2.StatResponse(
            node_id=node.node_id,
            boot_id=node.boot_id,
            draining=node.draining or node.leaving,
            capacity_bytes=table.capacity_bytes,
            used_bytes=table.used_bytes,
            objects=len(table),
            pinned_objects=len(table.pinned),
            pinned_bytes=table.pinned_bytes,
            pinned_max_bytes=table.pinned_max_bytes,
            leases=table.leases,
            open_puts=table.open_puts,
            hits=table.counters.hits,
            misses=table.counters.misses,
            evicted=table.eviction.evicted,
            refused=table.counters.refused_slots,
        )
        if tier is not None:
            reply.disk_capacity_bytes, reply.disk_used_bytes = tier.log.capacity_bytes, tier.log.used_bytes
            reply.disk_objects, reply.disk_unsaved = len(tier.log), tier.unsaved
            reply.disk_failures = tier.failures
        return reply

    async def Pin(self, request: admin_pb2.PinRequest, context: Any) -> admin_pb2.PinResponse:
        who = admitted(context)
        pinned = await self._node.pin(_keys(request), request.duration_ms / 1000)
        _log.warning("%s pinned %d objects", who, len(pinned))
        return admin_pb2.PinResponse(pinned=pack_keys(pinned))

    async def Unpin(self, request: admin_pb2.UnpinRequest, context: Any) -> admin_pb2.UnpinResponse:
        who = admitted(context)
        unpinned = self._node.unpin(_keys(request))
        _log.warning("%s unpinned %d objects", who, len(unpinned))
        return admin_pb2.UnpinResponse(unpinned=pack_keys(unpinned))

    async def Evict(self, request: admin_pb2.EvictRequest, context: Any) -> admin_pb2.EvictResponse:
        who = admitted(context)
        if bool(request.keys) == request.every or (request.keys and request.HasField("tenant")):
            raise InvalidArgument("either keys are named, or every is true (with or without a tenant)", field="keys")
        found = await self._found(request)
        chosen = [each for each in found if request.keys or each.key not in self._node.table.pinned]
        kept, size = len(found) - len(chosen), sum([each.size for each in chosen])
        evicted = await self._node.drop([each.key for each in chosen])
        _log.warning("%s evicted %d objects", who, evicted)
        read = self._node.table.still_read
        return admin_pb2.EvictResponse(evicted=evicted, evicted_bytes=size, still_read=read, kept=kept)


def _keys(request: Any) -> list[BlockKey]:
    return keys_from_proto(request.keys, MAX_KEYS)


def _object_to_proto(each: KvObject, now_s: float, pinned: bool) -> admin_pb2.StoredObject:
    in_memory = isfinite(each.used_s)
    return admin_pb2.StoredObject(
        key=each.key,
        size_bytes=each.size,
        on_disk=not in_memory,
        tenant=each.traits.tenant,
        category=each.traits.category,
        leases=each.readers - pinned,
        pinned=pinned,
        idle_ms=max(0, round((now_s - each.used_s) * 1000)) if in_memory else None,
    )
