"""The worker's report to the conductor: itself, its load, measured prefills, ended requests, changes of its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import secret_id
from pinyon.core.served import Served
from pinyon.messages.prefill_report import first_token_to_proto
from pinyon.paging import BlockPool
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from services.worker.orders.ledger import Ledger, PrefillOutcome


@dataclass(slots=True, eq=False)
class WorkerReport:
    """The source of the worker's reports, see :class:`pinyon.runtime.report_session.ReportSource`.

    The load comes from ``reported``, but for the time between tokens and the conditions it was measured under. The ids
    of the requests that have not ended come from ``decoding``.
    """

    pool: BlockPool
    ledger: Ledger
    reported: Callable[[], InstanceLoad]
    decoding: Callable[[], Sequence[str]]

    def snapshot_keys(self) -> Sequence[bytes]:
        return self.pool.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self.pool.drain_changes()

    def load(self) -> InstanceLoad:
        load = self.reported()
        tbt_ms, batch, kv_tokens = self.ledger.token_times.take(idle=not load.running_requests)
        return replace(load, mean_tbt_ms=tbt_ms, mean_batch=batch, mean_kv_tokens=kv_tokens)

    def news(self) -> conductor_pb2.ReportSessionRequest:
        happened = self.ledger.take()
        return conductor_pb2.ReportSessionRequest(
            prefills=[_measured(outcome) for outcome in happened.measured],
            first_tokens=[first_token_to_proto(*each) for each in happened.first_tokens],
            begun_prefill_request_ids=happened.begun_prefills,
            begun_decode_request_ids=happened.begun_decodes,
            ended_prefill_request_ids=happened.ended_prefills,
            ended_decode_request_ids=happened.ended_decodes,
        )


def instance_info(served: Served, boot_id: str, address: str, max_batch: int, short_first: bool) -> InstanceInfo:
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
        max_batch=max_batch,
        max_context_tokens=served.max_context,
        key_secret_id=secret_id(served.secret),
        short_first=short_first,
    )


def _measured(outcome: PrefillOutcome) -> conductor_pb2.PrefillMeasurement:
    """Returns the measurement that the conductor's estimates learn from."""
    report = outcome.first.report
    return conductor_pb2.PrefillMeasurement(
        computed_tokens=report.computed_tokens,
        prefix_tokens=report.reused_tokens,
        compute_us=round(report.compute_ms * 1e3),
        fetched_bytes=outcome.fetched_bytes,
        fetch_us=round(report.fetch_ms * 1e3),
        fetches=[
            conductor_pb2.FetchMeasurement(
                source_id=span.source_id, fetched_bytes=span.bytes, fetch_us=round(span.seconds * 1e6)
            )
            for span in outcome.spans
        ],
    )
