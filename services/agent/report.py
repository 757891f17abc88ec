"""The reports of a server to the conductor: its blocks by their events, its load and speed by its metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.messages.instance import LOAD_MS_MAX
from pinyon.placement.instances import InstanceLoad
from pinyon.routing.server_load import ServerKind, read_load, read_series, read_sum
from services.agent.engine_blocks import EngineBlocks

NUMBER_MAX = 1 << 31
PREFILLS_MAX = 64
"""The maximum number of measured prefills that wait for a report; more replace the oldest."""
BUSY_S = 5.0
"""The time after which prefills are measured at a server that is never idle."""
_CACHE = rb'^(?:vllm|sglang):cache_config_info(?:\{|\{.*,)%b="(\d{1,10})"'
_GAUGE = rb"^sglang:%b(?:\{.*\})? ([0-9.e+]{1,32})(?: |$)"
_BLOCK_TOKENS = [
    # with that of all ranks that share a context, as in the events
    re.compile(_CACHE % b"effective_attention_block_size", re.M),
    re.compile(_CACHE % rb"(?:block|page)_size", re.M),
    re.compile(_GAUGE % b"page_size", re.M),
]
_BLOCKS = [re.compile(_CACHE % rb"num_(?:gpu_blocks|pages)", re.M), re.compile(_GAUGE % b"num_pages", re.M)]
"""The places where servers tell the size of a block, and their number. All ranks of one model tell the same."""
_ENGINE = re.compile(rb'^vllm:cache_config_info\{(?:.*,)?engine="([^"]*)"', re.M)
_STARTED = b"process_start_time_seconds"
_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
_PROMPT_TOKENS = (b"vllm:prompt_tokens_total", b"sglang:prompt_tokens_total")
_TOKEN_TIMES = (
    *(b"vllm:inter_token_latency_seconds", b"vllm:time_per_output_token_seconds"),
    *(b"sglang:inter_token_latency_seconds", b"sglang:time_per_output_token_seconds"),
)
_PREFILL = (
    *(b"vllm:request_prefill_time_seconds", b"vllm:request_prompt_tokens"),
    b"vllm:request_prefill_kv_computed_tokens",
)
"""Histograms of vLLM over ended requests."""


def read_cache(page: bytes) -> tuple[int, int]:
    """Returns the tokens of a block and the number of blocks; 0 for what the page does not tell."""
    size, blocks = (
        next((_whole(found[1]) for pattern in patterns if (found := pattern.search(page))), 0)
        for patterns in (_BLOCK_TOKENS, _BLOCKS)
    )
    return size, blocks


def engines(page: bytes) -> int:
    """Returns how many engines share the work of this server, as far as its page tells."""
    return len(set(_ENGINE.findall(page))) or 1


@dataclass(eq=False)
class ServerReport:
    """The reports of one life of a server: a :class:`pinyon.runtime.report_session.ReportSource`.

    Requests are not in them, as nothing tells which of them the server has."""

    kind: ServerKind | None
    blocks: int
    held: EngineBlocks
    draining: bool = False
    _load: InstanceLoad = field(default_factory=InstanceLoad)
    _started_s: float = 0.0
    _prompt_tokens: float = 0.0
    _times: tuple[float, float] = (0.0, 0.0)
    """The seconds between tokens, and their number."""
    _told_times: tuple[float, float] = (0.0, 0.0)
    _since: tuple[float, tuple[float, ...]] = (0.0, ())
    """The time of the last measurement, or when the server was idle last, with the sums of :data:`_PREFILL`."""
    _prefills: list[conductor_pb2.PrefillMeasurement] = field(default_factory=list)

    def read(self, page: bytes, now_s: float) -> bool:
        """Takes the server's metrics of the time ``now_s``. Returns False if they are of another life than before."""
        was_s, had = self._started_s, self._prompt_tokens
        shown = None if self.kind is None else read_load(self.kind, page)
        self._started_s = _first(page, _STARTED, otherwise=was_s)
        # A page with load and without this counter is of a server that has just started.
        self._prompt_tokens = _first(page, *_PROMPT_TOKENS, otherwise=had if shown is None else 0.0)
        usage = next((max(values) for name in _USAGE if (values := read_series(page, name))), 0.0)
        used = round(min(1.0, usage) * self.blocks)
        self._load = InstanceLoad(used_blocks=used, kv_tokens=used * self.held.block_tokens)
        if shown is not None:
            self._load.pending_requests = self._load.waiting_for_room = shown.pending
            self._load.running_requests = shown.running
            self._measure(page, now_s, idle=not shown.pending + shown.running)
        self._times = _sum_and_count(page, *_TOKEN_TIMES)
        if not self._told_times[1]:
            self._told_times = self._times
        return self._prompt_tokens >= had and was_s in (0.0, self._started_s)

    def _measure(self, page: bytes, now_s: float, *, idle: bool) -> None:
        """Measures the mean prefill of the requests that have ended since the server was idle, or since the last time.

        Prefills beside each other take longer: all together count as no longer than the time that has passed."""
        before_s, before = self._since
        if before and not idle and now_s < before_s + BUSY_S:
            return
        sums = tuple(value for name in _PREFILL for value in _sum_and_count(page, name, otherwise=-1))
        if min(sums) < 0:
            return
        seconds, prefills, prompt, prompts, computed, counted = since = tuple(map(sub, sums, before or sums))
        if min(since) < 0 or (before and not prefills and not idle):
            return  # another life's, or a long one is under way
        self._since = now_s, sums
        if prefills == prompts == counted >= 1 and seconds > 0 and 0 < computed <= prompt < NUMBER_MAX:
            each_s = min(seconds, now_s - before_s) / prefills
            measured = conductor_pb2.PrefillMeasurement(compute_us=max(1, round(each_s * 1e6)))
            measured.computed_tokens = max(1, round(computed / prefills))
            measured.prefix_tokens = round((prompt - computed) / prefills)
            self._prefills = [*self._prefills[1 - PREFILLS_MAX :], measured]

    # -- for the conductor

    def snapshot_keys(self) -> Sequence[bytes]:
        return self.held.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self.held.changes.drain()

    def load(self) -> InstanceLoad:
        """Returns the load, with the mean time between the tokens since the last call."""
        seconds, tokens = map(sub, self._times, self._told_times)
        self._told_times = self._times
        self._load.mean_tbt_ms = min(LOAD_MS_MAX, max(0.0, seconds) / tokens * 1e3) if tokens > 0 else 0.0
        self._load.cached_blocks = max(0, len(self.held) - self._load.used_blocks)
        self._load.draining = self.draining
        return self._load

    def news(self) -> conductor_pb2.ReportSessionRequest:
        """Returns the prefills measured since the last call."""
        measured, self._prefills = self._prefills, []
        return conductor_pb2.ReportSessionRequest(prefills=measured)

    def decoding(self) -> Sequence[str]:
        return ()


def _whole(text: bytes) -> int:
    """Returns the number if it is whole and makes sense; else 0."""
    try:
        value = float(text)
    except ValueError:
        return 0
    return int(value) if value.is_integer() and value <= NUMBER_MAX else 0


def _first(page: bytes, *names: bytes, otherwise: float = 0.0) -> float:
    """Returns the sum of the first of these metrics that the page has, ``otherwise`` if it has none."""
    return next((value for name in names if (value := read_sum(page, name)) >= 0), otherwise)


def _sum_and_count(page: bytes, *names: bytes, otherwise: float = 0.0) -> tuple[float, float]:
    """Returns those of the first of these histograms that the page has."""
    total, count = (_first(page, *(name + end for name in names), otherwise=otherwise) for end in (b"_sum", b"_count"))
    return total, count
