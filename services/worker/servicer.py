"""The worker's gRPC methods: proto in, the parts that know do the work, proto out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import unpack_keys
from pinyon.core.errors import InvalidArgument
from pinyon.runtime.interceptors import error_from_proto
from pinyon.store.segments import segment_to_proto
from services.worker.decode.lb_sessions import LbSessions
from services.worker.decode.updates import UpdateBuffer
from services.worker.parts import Core
from services.worker.prefill.prefills import Prefills
from services.worker.prefill.session import PrefillSession
from services.worker.report import role_to_proto

__all__ = ["BlockReadServicer", "WorkerServicer"]

MAX_KEYS = 4096


class WorkerServicer:
    """``pinyon.api.worker.v1.WorkerService``."""

    def __init__(self, core: Core, prefills: Prefills, sessions: LbSessions) -> None:
        self._core = core
        self._prefills = prefills
        self._sessions = sessions

    async def Session(self, _: object, context: Any) -> None:
        await self._sessions.run(context)

    async def PrefillSession(self, _: object, context: Any) -> None:
        await PrefillSession(self._core, self._prefills).run(context)

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        updates = UpdateBuffer(self._core.settings.outbox_tokens)
        running = self._sessions.decodes.submit(request.submission, updates)
        running.ended.add_done_callback(lambda _: updates.close())
        try:
            while (message := await updates.take()) is not None:
                for update in message.updates:
                    if update.HasField("error"):
                        raise error_from_proto(update.error)
                    yield worker_pb2.GenerateResponse(update=update)
            if updates.overflow.done():
                updates.overflow.result()
        finally:
            self._sessions.decodes.cancel(running, "the client went away")

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.GetStatusResponse:
        core = self._core
        return worker_pb2.GetStatusResponse(
            instance_id=core.served.instance_id,
            role=role_to_proto(core.served.role),
            model=core.served.name,
            pending_requests=self._sessions.decodes.pending + self._prefills.queue.foreign,
            running_requests=core.members.running,
            used_blocks=core.cache.pool.used,
            cached_blocks=core.cache.pool.cached,
            total_blocks=core.cache.pool.total,
            leases=core.cache.leases,
            draining=core.draining,
        )


class BlockReadServicer:
    """``pinyon.api.kvstore.v1.BlockReadService``: peers read blocks that are complete here."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # Only the region that is open for reading: the other keys belong to single prefill sessions.
        self._segment = segment_to_proto(core.transfer.descriptor([core.region]))

    async def Acquire(self, request: kvstore_pb2.AcquireRequest, context: Any) -> kvstore_pb2.AcquireResponse:
        core = self._core
        try:
            keys = unpack_keys(request.keys)
        except ValueError as error:
            raise InvalidArgument(str(error), field="keys") from None
        if not 0 < len(keys) <= MAX_KEYS:
            raise InvalidArgument(f"keys must be 1 to {MAX_KEYS}, got {len(keys)}", field="keys")
        settings = core.settings
        lease_s = min(request.lease_ms / 1000 if request.lease_ms else settings.lease_s, settings.max_lease_s)
        with core.telemetry.span("acquire", request.traceparent, request_id=request.request_id) as span:
            lease_id, held = core.cache.lease(keys, lease_s, allow_gaps=request.allow_gaps)
            span.set("blocks", len(held))
        size = core.served.layout.block_bytes
        return kvstore_pb2.AcquireResponse(
            lease_id=lease_id,
            lease_ms=round(1000 * lease_s),
            segment=self._segment,
            blocks=[
                kvstore_pb2.BlockLocation(index=index, offset_bytes=block * size, length_bytes=size)
                for index, block in held
            ],
        )

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        return kvstore_pb2.ReleaseResponse(released=self._core.cache.end_lease(request.lease_id))
