"""The reports of a server to the conductor: its blocks by their events, its load and speed by its metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import sub

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.messages.instance import LOAD_MS_MAX
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from pinyon.routing.server_load import ServerKind, read_load, read_sum
from services.agent.held_blocks import HeldBlocks

NUMBER_MAX = 1 << 31
PREFILLS_MAX = 64
"""The maximum number of measured prefills that wait for a report; more replace the oldest."""
_CACHE = rb'^(?:vllm|sglang):cache_config_info(?:\{|\{.*,)%b="(\d{1,10})"'
_BLOCK_TOKENS = re.compile(_CACHE % rb"(?:block|page)_size", re.MULTILINE)
_BLOCKS = re.compile(_CACHE % rb"num_(?:gpu_blocks|pages)", re.MULTILINE)
_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
_TOKEN_TIMES = tuple(
    maker + name
    for maker in (b"vllm:", b"sglang:")
    for name in (b"inter_token_latency_seconds", b"time_per_output_token_seconds")
)
_PROMPT_TOKENS = (b"vllm:prompt_tokens_total", b"sglang:prompt_tokens_total")
_PREFILL = (
    *(b"vllm:request_prefill_time_seconds", b"vllm:request_prompt_tokens"),
    b"vllm:request_prefill_kv_computed_tokens",
)
"""Histograms over ended requests."""


def read_cache(page: bytes) -> tuple[int, int]:
    """Returns the tokens of a block and the number of blocks; 0 for what the page does not tell."""
    size, blocks = _BLOCK_TOKENS.search(page), _BLOCKS.search(page)
    return (
        min(NUMBER_MAX, int(size[1] if size else _first(page, (b"sglang:page_size",)))),
        min(NUMBER_MAX, int(blocks[1] if blocks else _first(page, (b"sglang:num_pages",)))),
    )


class ServerReport:
    """The reports of one life of a server: a :class:`pinyon.runtime.report_session.ReportSource`.

    Requests are not in them, as nothing tells which of them the server has."""

    def __init__(self, info: InstanceInfo, kind: ServerKind | None, held: HeldBlocks) -> None:
        assert info.layout is not None
        self._blocks, self._block_tokens = info.capacity_blocks, info.layout.block_tokens
        self._kind = kind
        self._held = held
        self.draining = False
        self._load = InstanceLoad()
        self._started_s = self._prompt_tokens = 0.0
        self._times = self._told_times = (0.0, 0.0)
        """The seconds between tokens and their number, as shown last and as reported last."""
        self._idle: tuple[float, ...] = ()
        """The sums of :data:`_PREFILL` when the server was idle last."""
        self._prefills: list[conductor_pb2.PrefillMeasurement] = []

    def read(self, page: bytes) -> bool:
        """Takes a page of the server's metrics. Returns False if it is of another life than the pages before."""
        was_s, had = self._started_s, self._prompt_tokens
        self._started_s = _first(page, (b"process_start_time_seconds",))
        self._prompt_tokens = _first(page, _PROMPT_TOKENS)
        used = round(min(1.0, _first(page, _USAGE)) * self._blocks)
        self._load = InstanceLoad(used_blocks=used, kv_tokens=used * self._block_tokens)
        shown = None if self._kind is None else read_load(self._kind, page)
        if shown is not None:
            self._load.pending_requests = self._load.waiting_for_room = shown.pending
            self._load.running_requests = shown.running
            if not shown.pending + shown.running:
                self._measure(page)
        self._times = _histogram(page, _TOKEN_TIMES)
        if not self._told_times[1]:
            self._told_times = self._times
        return self._prompt_tokens >= had and was_s in (0.0, self._started_s)

    def _measure(self, page: bytes) -> None:
        """Measures a prefill if exactly one request came and went since the server was idle last.

        Sums of several requests cannot be told apart, and one among others waits for them."""
        sums = (self._prompt_tokens, *(value for name in _PREFILL for value in _histogram(page, (name,))))
        before, self._idle = self._idle or sums, sums
        tokens, seconds, prefills, prompt, prompts, computed, counted = map(sub, sums, before)
        alone = prefills == prompts == counted == 1 and tokens == prompt
        if alone and seconds > 0 and 0 < computed <= prompt < NUMBER_MAX:
            del self._prefills[: 1 - PREFILLS_MAX]
            self._prefills.append(
                conductor_pb2.PrefillMeasurement(
                    computed_tokens=int(computed), prefix_tokens=int(prompt - computed), compute_us=round(seconds * 1e6)
                )
            )

    # -- for the conductor

    def snapshot_keys(self) -> Sequence[bytes]:
        return self._held.keys()

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._held.changes.drain()

    def load(self) -> InstanceLoad:
        """Returns the load, with the mean time between the tokens since the last call."""
        seconds, tokens = map(sub, self._times, self._told_times)
        self._told_times = self._times
        self._load.mean_tbt_ms = min(LOAD_MS_MAX, max(0.0, seconds) / tokens * 1e3) if tokens > 0 else 0.0
        self._load.cached_blocks = max(0, len(self._held) - self._load.used_blocks)
        self._load.draining = self.draining
        return self._load

    def news(self) -> conductor_pb2.ReportSessionRequest:
        """Returns the prefills measured since the last call."""
        measured, self._prefills = self._prefills, []
        return conductor_pb2.ReportSessionRequest(prefills=measured)

    def decoding(self) -> Sequence[str]:
        return ()


def _first(page: bytes, names: tuple[bytes, ...]) -> float:
    """Returns the sum of the first of these metrics that the page has; 0 if it has none."""
    return next((value for name in names if (value := read_sum(page, name)) >= 0), 0.0)


def _histogram(page: bytes, names: tuple[bytes, ...]) -> tuple[float, float]:
    """Returns the sum and the count of the first of these histograms that the page has."""
    total, count = (_first(page, tuple(name + end for name in names)) for end in (b"_sum", b"_count"))
    return total, count
