"""The worker's load, and its report to the conductor: measured prefills, ended requests, changes of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.batching import LEVEL_BLOCKS
from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.core.block_keys import secret_id
from pinyon.core.served import Served
from pinyon.decisions import BatchLoad, BatchRoom
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from services.worker.decode.decodes import Decodes
from services.worker.instance.parts import Parts
from services.worker.prefill.prefills import Prefills
from services.worker.settings import WorkerSettings


class WorkerReport:
    """The load that load balancers, the conductor and the metrics are told, and the source of the worker's reports.

    See :class:`pinyon.runtime.report_session.ReportSource`."""

    def __init__(self, parts: Parts, prefills: Prefills, decodes: Decodes, room: BatchRoom) -> None:
        self._parts = parts
        self._prefills = prefills
        self._decodes = decodes
        self._room = room

    def batch(self) -> BatchLoad:
        """Returns how many requests wait for room, and how many more would fit. O(requests); any thread may ask."""
        look = self._room.look(self._decodes.owned, self._decodes.elsewhere)
        return replace(look, room=0) if look.room and self._parts.refusing else look

    def told(self) -> worker_pb2.Load:
        """Returns the load for a load balancer, without its session's own fields."""
        batch = self.batch()
        return worker_pb2.Load(
            pending=batch.waiting,
            running=batch.running,
            room=batch.room,
            max_batch=self._parts.limits.max_batch,
            pending_prefill_tokens=self._prefills.queue.pending_tokens,
            draining=self._parts.refusing,
        )

    def reported(self) -> InstanceLoad:
        """Returns the load for the conductor, without the time between tokens."""
        parts, batch = self._parts, self.batch()
        pool, members, reads_once = parts.cache.pool, parts.members, parts.members.scheduler.reads_once
        return InstanceLoad(
            pending_requests=self._decodes.pending + self._prefills.queue.foreign,
            running_requests=members.running,
            kv_tokens=members.kv_tokens,
            level_blocks=LEVEL_BLOCKS if reads_once else 0,
            shared=parts.cache.admission.prefixes.shared() if reads_once else (),
            pending_prefill_tokens=self._prefills.queue.pending_tokens,
            room_wait_ms=parts.cache.room_wait_s() * 1e3,
            used_blocks=pool.used,
            cached_blocks=pool.cached,
            draining=parts.refusing,
            failed_sources=frozenset(parts.fetcher.failed_sources()),
            waiting_for_room=batch.waiting,
            room=batch.room,
        )

    # -- for the conductor

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._parts.cache.pool.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._parts.cache.pool.drain_changes()

    def load(self) -> InstanceLoad:
        """Returns the load with the time between tokens and the conditions it was measured under, and forgets these."""
        load = self.reported()
        times = self._parts.ledger.token_times.take(idle=not load.running_requests)
        load.mean_tbt_ms, load.mean_batch, load.mean_kv_tokens = times
        return load

    def news(self) -> conductor_pb2.ReportSessionRequest:
        return self._parts.ledger.take()

    def decoding(self) -> Sequence[str]:
        return self._decodes.unfinished()


def instance_info(served: Served, boot_id: str, address: str, settings: WorkerSettings) -> InstanceInfo:
    """Returns this worker's registration with the conductor."""
    return InstanceInfo(
        instance_id=served.instance_id,
        boot_id=boot_id,
        role=served.role,
        address=address,
        model=served.name,
        model_fingerprint=served.fingerprint,
        layout=served.layout,
        capacity_blocks=served.pool_blocks,
        max_batch=settings.max_batch,
        max_context_tokens=served.max_context,
        key_secret_id=secret_id(served.secret),
        short_first=SERVICE_ORDERS.make(settings.service_order).short_first,
    )
