"""The worker's gRPC methods, which translate messages and leave the work to the parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted
from pinyon.messages.enums import role_to_proto
from pinyon.messages.error import error_from_proto
from pinyon.placement.instances import InstanceLoad
from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN, LB, WORKER
from pinyon.runtime.outgoing import Pace
from services.worker.decode.lb_sessions import LbSessions
from services.worker.decode.outgoing_updates import OutgoingUpdates
from services.worker.instance.parts import Parts
from services.worker.prefill.prefills import Prefills
from services.worker.prefill.session import PrefillSession

WORKER_CALLERS: Callers = {
    # Only a load balancer may act for a tenant.
    "Session": frozenset((LB,)),
    "Generate": frozenset((LB,)),
    # The session compares the instance id in the hello with that of the certificate.
    "PrefillSession": frozenset((WORKER,)),
    "GetStatus": frozenset((LB, WORKER, ADMIN)),
}
SESSIONS_MAX = 1024


class WorkerServicer:
    """The implementation of ``pinyon.api.worker.v1.WorkerService``."""

    def __init__(
        self, parts: Parts, prefills: Prefills, sessions: LbSessions, load: Callable[[], InstanceLoad]
    ) -> None:
        self._parts = parts
        self._prefills = prefills
        self._sessions = sessions
        self._load = load
        self._prefill_sessions = 0

    async def Session(self, _: object, context: Any) -> None:
        await self._sessions.run(context)

    async def PrefillSession(self, _: object, context: Any) -> None:
        if self._prefill_sessions >= SESSIONS_MAX:
            raise ResourceExhausted(f"{SESSIONS_MAX} decode instances are connected", field="prefill_instance")
        self._prefill_sessions += 1
        try:
            await PrefillSession(self._parts, self._prefills).run(context)
        finally:
            self._prefill_sessions -= 1

    async def Generate(self, request: worker_pb2.GenerateRequest, context: Any) -> None:
        """Writes the responses itself, so that cancels always arrive here and clients that read nothing are cut."""
        updates = OutgoingUpdates(self._parts.limits.outbox_tokens, Pace(lambda: 1, self._parts.clock))
        running = self._sessions.decodes.submit(request.submission, updates)
        running.ended.add_done_callback(lambda _: updates.close())
        try:
            async for message in updates:
                for update in message.updates:
                    if update.HasField("error"):
                        raise error_from_proto(update.error)
                    async with asyncio.timeout(self._parts.limits.write_timeout_s):
                        await context.write(worker_pb2.GenerateResponse(update=update))
            if updates.overflow.done():
                updates.overflow.result()
        except TimeoutError:
            raise ResourceExhausted("the client reads too slowly") from None
        finally:
            self._sessions.decodes.cancel(running, "the client went away")

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.GetStatusResponse:
        parts, load = self._parts, self._load()
        return worker_pb2.GetStatusResponse(
            instance_id=parts.served.instance_id,
            role=role_to_proto(parts.served.role),
            model=parts.served.name,
            pending_requests=load.pending_requests,
            running_requests=load.running_requests,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
            total_blocks=parts.cache.pool.total,
            leases=parts.cache.leases,
            draining=load.draining,
        )
