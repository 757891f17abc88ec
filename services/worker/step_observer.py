"""The effects of a finished step on metrics, policies, and the conductor's report."""

from __future__ import annotations

from pinyon.batching import StepSeen
from pinyon.core.clock import Clock
from services.worker.instance.step_members import EngineStep, StepMembers, StepOutcome
from services.worker.kv.cache import KvCache
from services.worker.metrics import WorkerMetrics
from services.worker.orders.ledger import Ledger


class StepObserver:
    """The observer of one engine loop."""

    def __init__(
        self, metrics: WorkerMetrics, cache: KvCache, members: StepMembers, ledger: Ledger, clock: Clock
    ) -> None:
        self._metrics = metrics
        self._cache = cache
        self._members = members
        self._ledger = ledger
        self._clock = clock
        self._last_decode_s = 0.0
        """The time of the last step's end, if it decoded anything and a request still waits for its next token."""

    def observe(self, step: EngineStep, outcome: StepOutcome, sampled: int) -> None:
        self._metrics.step(step, outcome, sampled)
        decodes = len(step.decodes)
        seen = StepSeen(decodes, step.tokens - decodes, outcome.elapsed_s, decode_s=outcome.decode_s)
        self._cache.admission.observe(seen)
        self._members.scheduler.observe(seen)
        if not decodes:
            self._last_decode_s = 0.0
            return
        now_s = self._clock()
        if self._last_decode_s:
            running = self._members.running
            kv_tokens = self._members.kv_tokens
            if decodes >= running:  # some may have ended with the step
                kv_tokens = 0
                for slot in step.slots:
                    kv_tokens += slot.position
            times = self._ledger.token_times
            times.decoded(decodes, now_s - self._last_decode_s, kv_tokens, running=running)
        # If all requests have ended, the time until the next one comes is not a time between tokens.
        self._last_decode_s = now_s if self._members.running else 0.0
