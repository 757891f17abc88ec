"""The times of vLLM's steps and requests, as the conductor's cost models learn them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.orders import PrefillReport
from pinyon.runtime.ledger import Ledger
from pinyon.vllm.jobs import Loaded

STEPS_MAX = 16
"""The maximum number of steps under way; vLLM plans some before the one before has ended."""
MEASURED_SPANS_MAX = 16


@dataclass(slots=True)
class RequestTimes:
    """The times of one request so far, in seconds of the engine's clock."""

    arrived_s: float
    prompt_tokens: int
    placed_as: str = ""
    """The id under which the conductor placed it; empty if it did not."""
    number: int = 0
    """The placement's number at the conductor."""
    computes: bool = True
    """False if another instance was to compute the prompt, and this one decodes."""
    decodes: bool = True
    """False if another instance decodes."""
    before_s: float = 0.0
    """The time that another instance took for the prompt."""
    reports: bool = True
    """False if another choice of the same request reports the placement's times."""
    load_begun_s: float = 0.0
    load_s: float = 0.0
    begun_s: float = 0.0
    """The time when its first tokens were planned; 0: not yet."""
    compute_s: float = 0.0
    computed_tokens: int = 0
    local_tokens: int = 0
    peer_blocks: int = 0
    store_blocks: int = 0
    spans: list[tuple[str, int, float]] = field(default_factory=list)
    loaded_tokens: int = 0
    answered: bool = False
    """True once it has its first token, or is about to."""
    last_tokens: int = 0
    """Tokens with KV."""

    def load_begun(self, now_s: float) -> None:
        self.load_begun_s = now_s

    def loaded(self, news: Loaded) -> None:
        self.peer_blocks, self.store_blocks = news.peer_blocks, news.store_blocks
        self.spans += news.spans[-MEASURED_SPANS_MAX:]

    def load_ended(self, now_s: float, blocks: int, block_tokens: int) -> None:
        self.load_s += now_s - self.load_begun_s
        self.loaded_tokens = blocks * block_tokens


@dataclass(slots=True)
class _Step:
    number: int
    begun_s: float
    prefills: list[tuple[RequestTimes, int]]
    """Prompts, and how many of their tokens are computed."""
    first_tokens: list[RequestTimes]
    """The prompts that get their first token."""
    decodes: int
    kv_tokens: int


class Times:
    """The times of an engine: steps from :meth:`step` to :meth:`step_ended`, in that order.

    EngineCore's thread tells of them, and the event loop's thread takes what is new."""

    def __init__(self, instance_id: str, block_tokens: int) -> None:
        self.instance_id = instance_id
        self._block_tokens = block_tokens
        self._steps: deque[_Step] = deque(maxlen=STEPS_MAX)
        self._ended_s = 0.0
        self._lock = threading.Lock()
        self._choices: Counter[str] = Counter()
        """The choices under way of each placed request: vLLM makes a request of each, and the first reports for all."""
        self._ledger = Ledger(lambda report: None)
        self.running = 0
        self.kv_tokens = 0

    def arrived(self, times: RequestTimes) -> None:
        if times.placed_as:
            with self._lock:
                self._choices[times.placed_as] += 1
                times.reports = self._choices[times.placed_as] == 1
                if times.reports and times.decodes:
                    self._ledger.decode_begun(times.placed_as)

    def take(self) -> conductor_pb2.ReportSessionRequest:
        """Returns all events since the last call, and forgets them."""
        with self._lock:
            return self._ledger.take()

    def take_token_times(self) -> tuple[float, float, float]:
        """Returns the times between tokens since the last call: see :class:`pinyon.batching.token_times.TokenTimes`."""
        with self._lock:
            return self._ledger.token_times.take(idle=not self.running)

    def step(
        self,
        number: int,
        now_s: float,
        prompts: Sequence[tuple[RequestTimes, int, int]],
        running: int,
        decodes: int,
        decoded_tokens: int,
    ) -> None:
        """Notes a planned step of ``running`` requests. Each prompt comes with its tokens with KV, and how many more it
        gets. The other requests are counted: those that it decodes, and their tokens with KV after it."""
        prefills: list[tuple[RequestTimes, int]] = []
        first_tokens: list[RequestTimes] = []
        kv_tokens = decoded_tokens
        for times, computed, tokens in prompts:
            times.last_tokens = computed + tokens
            kv_tokens += times.last_tokens
            if not times.begun_s:
                times.begun_s = now_s
                times.local_tokens = max(0, computed - times.loaded_tokens)
                if times.placed_as and times.reports and times.computes:
                    with self._lock:
                        self._ledger.prefill_begun(times.placed_as)
            prefills.append((times, tokens))
            if times.last_tokens >= times.prompt_tokens:
                times.answered = True
                first_tokens.append(times)
        self.running, self.kv_tokens = running, kv_tokens
        self._steps.append(_Step(number, now_s, prefills, first_tokens, decodes, kv_tokens))

    def step_ended(self, number: int, now_s: float) -> None:
        while self._steps and self._steps[0].number < number:
            self._steps.popleft()
        if not self._steps or self._steps[0].number != number:
            return
        step = self._steps.popleft()
        seconds = now_s - max(step.begun_s, self._ended_s)
        self._ended_s = now_s
        with self._lock:
            self._step_ended(step, seconds, now_s)

    def _step_ended(self, step: _Step, seconds: float, now_s: float) -> None:
        if step.decodes:
            self._ledger.token_times.decoded(step.decodes, seconds, step.kv_tokens)
        computed = sum(tokens for _, tokens in step.prefills)
        for times, tokens in step.prefills:
            times.compute_s += seconds * tokens / computed
            times.computed_tokens += tokens
        for times in step.first_tokens:
            self._first_token(now_s, times)

    def _first_token(self, now_s: float, times: RequestTimes) -> None:
        size = self._block_tokens
        report = PrefillReport(
            self.instance_id,
            queue_ms=max(0.0, times.begun_s - times.arrived_s - times.load_s) * 1e3,
            fetch_ms=times.load_s * 1e3,
            compute_ms=times.compute_s * 1e3,
            computed_tokens=times.computed_tokens,
            local_tokens=times.local_tokens,
            peer_tokens=times.peer_blocks * size,
            store_tokens=times.store_blocks * size,
        )
        spans = [
            conductor_pb2.FetchMeasurement(source_id=source, fetched_bytes=size, fetch_us=round(seconds * 1e6))
            for source, size, seconds in times.spans
        ]
        self._ledger.prefill_measured(report, sum(size for _, size, _ in times.spans), spans)
        if times.reports:
            if times.decodes:
                self._ledger.first_token(times.number, times.before_s + now_s - times.arrived_s, report)
            if times.placed_as and times.computes:
                self._ledger.prefill_ended(times.placed_as)

    def ended(self, times: RequestTimes) -> None:
        """Notes the end of a request, whatever it was."""
        if times.placed_as:
            with self._lock:
                if times.reports and times.computes and not times.answered:
                    self._ledger.prefill_ended(times.placed_as)
                self._choices[times.placed_as] -= 1
                if not self._choices[times.placed_as]:
                    del self._choices[times.placed_as]
                    if times.decodes:
                        self._ledger.decode_ended(times.placed_as)
