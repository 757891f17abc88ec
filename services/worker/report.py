"""What this worker tells the conductor: itself, its load, measured prefills, ended requests, changes of its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import secret_id
from pinyon.messages.instance import info_to_proto, load_to_proto
from pinyon.paging import BlockPool
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from services.worker.orders.convert import first_token_to_proto, measurement_to_proto
from services.worker.orders.ledger import Ledger
from services.worker.orders.served import Served


class WorkerReport:
    """See :class:`pinyon.runtime.report_session.ReportSource`. ``load`` knows all but the time between tokens and what
    it was measured at, and ``decoding`` the ids of the requests that have not ended."""

    def __init__(
        self,
        pool: BlockPool,
        ledger: Ledger,
        load: Callable[[], InstanceLoad],
        decoding: Callable[[], Sequence[str]],
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._load = load
        self._decoding = decoding

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._pool.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._pool.drain_changes()

    def load(self) -> conductor_pb2.InstanceLoad:
        load = self._load()
        tbt_ms, batch, kv_tokens = self._ledger.token_times.take(idle=not load.running_requests)
        return load_to_proto(replace(load, mean_tbt_ms=tbt_ms, mean_batch=batch, mean_kv_tokens=kv_tokens))

    def news(self) -> conductor_pb2.ReportSessionRequest:
        ledger = self._ledger
        begun_prefills, begun_decodes = ledger.take_begun()
        ended_prefills, ended_decodes = ledger.take_ended()
        return conductor_pb2.ReportSessionRequest(
            load=self.load(),
            prefills=[measurement_to_proto(outcome) for outcome in ledger.take_measured()],
            first_tokens=[first_token_to_proto(*each) for each in ledger.take_first_tokens()],
            begun_prefill_request_ids=begun_prefills,
            begun_decode_request_ids=begun_decodes,
            ended_prefill_request_ids=ended_prefills,
            ended_decode_request_ids=ended_decodes,
        )

    def decoding(self) -> Sequence[str]:
        return self._decoding()


def instance_info(
    served: Served, boot_id: str, address: str, max_batch: int, short_first: bool
) -> conductor_pb2.InstanceInfo:
    """How this worker registers with the conductor."""
    info = InstanceInfo(
        instance_id=served.instance_id,
        boot_id=boot_id,
        role=served.role,
        address=address,
        model=served.name,
        model_fingerprint=served.card.fingerprint,
        layout=served.layout,
        capacity_blocks=served.pool_blocks,
        max_batch=max_batch,
        max_context_tokens=served.max_context,
        key_secret_id=secret_id(served.secret),
        short_first=short_first,
    )
    return info_to_proto(info)
