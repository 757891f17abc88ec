"""vLLM as the conductor sees it: the source of an engine's reports."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.placement.instances import InstanceLoad
from pinyon.vllm.scheduler import SchedulerSide


class EngineReport:
    """See :class:`pinyon.runtime.report_session.ReportSource`. It reads what EngineCore's thread changes meanwhile:
    single values, copies, and what :class:`SchedulerSide` locks."""

    def __init__(self, side: SchedulerSide, max_batch: int) -> None:
        self._side = side
        self._max_batch = max_batch
        self.draining = True
        """True until vLLM's server answers, and when the engine takes nothing new."""

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._side.snapshot()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._side.changes()

    def load(self) -> InstanceLoad:
        side, pool = self._side, self._side.pool
        prompts = list(side.prompts.values())
        running = min(side.times.running, len(prompts))
        waiting = len(prompts) - running
        left = sum(max(0, each.times.prompt_tokens - each.times.last_tokens) for each in prompts)
        free = pool.get_num_free_blocks() if pool is not None else 0
        total = len(pool.blocks) - 1 if pool is not None else 0
        tbt_ms, batch, kv_tokens = side.times.take_token_times()
        return InstanceLoad(
            pending_requests=waiting,
            running_requests=running,
            pending_prefill_tokens=left,
            used_blocks=max(0, total - free),
            cached_blocks=min(free, len(side.cached)),
            mean_tbt_ms=tbt_ms,
            mean_batch=batch,
            mean_kv_tokens=kv_tokens,
            kv_tokens=side.times.kv_tokens,
            draining=self.draining,
            failed_sources=side.failed_sources,
            waiting_for_room=max(0, len(prompts) - self._max_batch),
            room=max(0, self._max_batch - len(prompts)),
        )

    def news(self) -> conductor_pb2.ReportSessionRequest:
        return self._side.times.take()

    def decoding(self) -> Sequence[str]:
        names = (each.times.placed_as for each in list(self._side.prompts.values()) if each.times.decodes)
        return list(dict.fromkeys(name for name in names if name))
