"""The present load of this worker."""

from __future__ import annotations

from dataclasses import replace

from pinyon.batching import LEVEL_BLOCKS
from pinyon.decisions import BatchLoad, BatchRoom
from pinyon.placement.instances import InstanceLoad
from services.worker.decode.decodes import Decodes
from services.worker.decode.load_news import ToldLoad
from services.worker.instance.parts import Parts
from services.worker.prefill.prefills import Prefills


class WorkerLoad:
    """The load that load balancers, the conductor and the metrics are told."""

    def __init__(self, parts: Parts, prefills: Prefills, decodes: Decodes, room: BatchRoom) -> None:
        self._parts = parts
        self._prefills = prefills
        self._decodes = decodes
        self._room = room

    def batch(self) -> BatchLoad:
        """Returns how many requests wait for room, and how many more would fit. O(requests); any thread may ask."""
        look = self._room.look(self._decodes.owned, self._decodes.elsewhere)
        return replace(look, room=0) if look.room and self._parts.refusing else look

    def told(self) -> ToldLoad:
        """Returns the load for a load balancer, without its session's own fields."""
        batch = self.batch()
        return ToldLoad(
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
