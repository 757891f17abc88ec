"""What this worker tells the conductor: load, measured prefills, ended requests, changes of its cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.request import Role
from services.worker.served import Served

if TYPE_CHECKING:
    from services.worker.decode.decodes import Decodes
    from services.worker.parts import Core
    from services.worker.prefill.job import PrefillOutcome
    from services.worker.prefill.prefills import Prefills

__all__ = ["Journal", "WorkerReport", "instance_info", "layout_to_proto", "role_to_proto"]

KEPT = 4096
"""Entries kept of each kind while nobody asks; the oldest go first."""

_ROLES = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
    Role.MIXED: common_pb2.ROLE_MIXED,
}


def _nobody() -> None:
    """Nobody is reported to."""


class Journal:
    """What happened since the last report. ``observe`` is told of every measured prefill at once.

    ``on_end`` is called whenever a part of a request ended: the conductor counts its predicted load until it knows.
    """

    def __init__(self, observe: Callable[[PrefillOutcome], None]) -> None:
        self._observe = observe
        self.on_end: Callable[[], None] = _nobody
        self._begun_decodes: deque[str] = deque(maxlen=KEPT)
        self._ended_prefills: deque[str] = deque(maxlen=KEPT)
        self._ended_decodes: deque[str] = deque(maxlen=KEPT)
        self._measured: deque[conductor_pb2.PrefillMeasurement] = deque(maxlen=KEPT)
        self._between_tokens_s = 0.0
        self._tokens = 0

    def decode_begun(self, request_id: str) -> None:
        """It goes with the next report: nobody waits for it."""
        self._begun_decodes.append(request_id)

    def prefill_ended(self, request_id: str) -> None:
        self._ended_prefills.append(request_id)
        self.on_end()

    def decode_ended(self, request_id: str) -> None:
        self._ended_decodes.append(request_id)
        self.on_end()

    def prefill_measured(self, outcome: PrefillOutcome) -> None:
        self._observe(outcome)
        self._measured.append(
            conductor_pb2.PrefillMeasurement(
                computed_tokens=outcome.computed_tokens,
                prefix_tokens=outcome.reused_tokens,
                compute_us=round(outcome.compute_s * 1e6),
                fetched_bytes=outcome.fetched_bytes,
                fetch_us=round(outcome.fetch_s * 1e6),
            )
        )

    def decoded(self, tokens: int, seconds: float) -> None:
        """``tokens`` requests got a token each, ``seconds`` after the one before."""
        self._tokens += tokens
        self._between_tokens_s += tokens * seconds

    def take_begun(self) -> list[str]:
        begun = list(self._begun_decodes)
        self._begun_decodes.clear()
        return begun

    def take_ended(self) -> tuple[list[str], list[str]]:
        ended = list(self._ended_prefills), list(self._ended_decodes)
        self._ended_prefills.clear()
        self._ended_decodes.clear()
        return ended

    def take_measured(self) -> list[conductor_pb2.PrefillMeasurement]:
        measured = list(self._measured)
        self._measured.clear()
        return measured

    def take_mean_tbt_ms(self) -> float:
        mean = 1000 * self._between_tokens_s / self._tokens if self._tokens else 0.0
        self._tokens, self._between_tokens_s = 0, 0.0
        return mean


class WorkerReport:
    """See :class:`pinyon.runtime.report_session.ReportSource`."""

    def __init__(self, core: Core, prefills: Prefills, decodes: Decodes) -> None:
        self._core = core
        self._prefills = prefills
        self._decodes = decodes

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._core.cache.pool.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._core.cache.pool.drain_changes()

    def load(self) -> conductor_pb2.InstanceLoad:
        core = self._core
        return conductor_pb2.InstanceLoad(
            pending_requests=self._decodes.pending + self._prefills.queue.foreign,
            running_requests=core.members.running,
            pending_prefill_tokens=self._prefills.queue.pending_tokens,
            used_blocks=core.cache.pool.used,
            cached_blocks=core.cache.pool.cached,
            mean_tbt_ms=core.journal.take_mean_tbt_ms(),
            draining=core.draining,
        )

    def drain_measurements(self) -> Sequence[conductor_pb2.PrefillMeasurement]:
        return self._core.journal.take_measured()

    def drain_begun(self) -> Sequence[str]:
        return self._core.journal.take_begun()

    def drain_ended(self) -> tuple[Sequence[str], Sequence[str]]:
        return self._core.journal.take_ended()


def role_to_proto(role: Role) -> common_pb2.Role:
    return _ROLES[role]


def layout_to_proto(served: Served) -> common_pb2.KvLayout:
    layout = served.layout
    return common_pb2.KvLayout(
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
    )


def instance_info(
    served: Served, boot_id: str, address: str, max_batch: int, geography: str
) -> conductor_pb2.InstanceInfo:
    """How this worker registers with the conductor."""
    return conductor_pb2.InstanceInfo(
        instance_id=served.instance_id,
        boot_id=boot_id,
        role=role_to_proto(served.role),
        address=address,
        model=served.name,
        model_fingerprint=served.card.fingerprint,
        layout=layout_to_proto(served),
        capacity_blocks=served.pool_blocks,
        max_batch=max_batch,
        max_context_tokens=served.max_context,
        geography=geography,
    )
