"""The load of an inference server: by the metrics that it shows to Prometheus, or as learned from its refusals.

Each kind of server has two gauges that matter: how many requests it runs, and how many it has accepted and has no room
in its batch for (SkyWalker §3.3). Only the lines of these gauges are read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from pinyon.routing.target import UNKNOWN, Report

SERIES_MAX: Final = 256
"""Series that are read of one gauge, which has one for each model and engine."""
REQUESTS_MAX: Final = 1 << 30
TOLD_MAX: Final = 1 << 20
"""The largest batch that a server is believed to have."""
CAPACITY_GUESS: Final = 32
CAPACITY_MAX: Final = 1024
_SHRINK: Final = 0.75
_PARTS: Final = re.compile(rb'^sglang:num_\w+\{(?:[^\n]*,)?priority="[^"\n][^\n]*$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server, with the names of its gauges ``pending`` and ``running``.

    It may say how many requests its batch holds: at one of ``paths``, in that JSON as one of ``members``, each the
    steps to a number. Both are tried in turn until one tells it. Its ``health`` is asked for at ``/health``, unless
    another path is named."""

    name: str
    pending: bytes
    running: bytes
    paths: tuple[bytes, ...] = ()
    members: tuple[tuple[str | int, ...], ...] = ()
    health: bytes = b""

    def capacity(self, told: Any) -> int:
        """Returns the requests in the server's batch as its JSON has it, in the first of ``members``; 0 if nowhere."""
        for member in self.members:
            value = told
            try:
                for step in member:
                    value = value[step]
            except (LookupError, TypeError):
                continue
            if type(value) is int and 0 < value <= TOLD_MAX:
                return value
        return 0


SERVER_KINDS: Final = (
    ServerKind("vllm", b"vllm:num_requests_waiting", b"vllm:num_requests_running"),
    ServerKind(
        "sglang", b"sglang:num_queue_reqs", b"sglang:num_running_reqs", (b"/server_info", b"/get_server_info"),
        (("internal_states", 0, "effective_max_running_requests_per_dp"), ("max_running_requests",)),
    ),
    ServerKind("tgi", b"tgi_queue_size", b"tgi_batch_current_size", (b"/info",), (("max_batch_size",),)),
    ServerKind(
        "llamacpp", b"llamacpp:requests_deferred", b"llamacpp:requests_processing", (b"/props",), (("total_slots",),)
    ),
    # Its /health is about the process only.
    ServerKind(
        "pinyon", b"pinyon_lb_queue_requests", b"pinyon_lb_in_flight_requests", health=b"/health/ready"
    ),
)  # fmt: skip
"""Gauges of vLLM 0.6 and later, SGLang 0.4, text-generation-inference 2, llama.cpp of 2024, and pinyon."""


class LearnedCapacity:
    """The number of requests that a server takes at once, learned from refusals where the server does not say.

    The value begins with a guess. A refusal (429, 503) shrinks it by a quarter. Each time it was used up and everybody
    got an answer, it grows by one: additive increase, multiplicative decrease."""

    def __init__(self, guess: int = CAPACITY_GUESS) -> None:
        self.value = guess
        self._served = 0

    def refused(self, outstanding: int) -> None:
        """Records a refusal among ``outstanding`` requests, itself included."""
        self._served = 0
        self.value = max(1, int(min(self.value, outstanding) * _SHRINK))

    def served(self, outstanding: int) -> bool:
        """Records a good end among ``outstanding`` requests, itself included. Returns whether the value changed."""
        if outstanding < self.value or self.value >= CAPACITY_MAX:
            return False
        self._served += 1
        if self._served < self.value:
            return False
        self._served = 0
        self.value += 1
        return True


def kind_of_page(page: bytes) -> ServerKind | None:
    """Returns the kind of server that shows these metrics; None if no known kind has its gauges there."""
    return next((kind for kind in SERVER_KINDS if read_load(kind, page) is not None), None)


def read_load(kind: ServerKind, page: bytes) -> Report | None:
    """Returns the load of the server; None where a gauge is missing, or is no number of requests."""
    pending, running = _read_total(page, kind.pending), _read_total(page, kind.running)
    if pending < 0 or running < 0:
        return None
    return Report(pending=int(min(pending, REQUESTS_MAX)), running=int(min(running, REQUESTS_MAX)))


def _read_total(page: bytes, name: bytes) -> float:
    """Returns the sum of a gauge's series, or :data:`UNKNOWN`; of those by priority, SGLang shows the total, too."""
    return read_sum(_PARTS.sub(b"", page) if b'priority=""' in page else page, name)


def read_sum(page: bytes, name: bytes) -> float:
    """Returns the sum of a metric's series, or :data:`UNKNOWN`."""
    values = read_series(page, name)
    return sum(values) if values else UNKNOWN


def read_series(page: bytes, name: bytes) -> list[float]:
    """Returns the values of a metric's series; none if one of them is no number."""
    values: list[float] = []
    # The value follows the last brace: braces in labels come before it.
    for series in re.finditer(re.escape(name) + rb"(?:\{.*\}|(?=[ \t{]))(.*)", page):
        if series.start() and page[series.start() - 1] != 10:  # a comment, or the end of a longer name
            continue
        value = _number(series[1])
        if value < 0:
            return []
        values.append(value)
        if len(values) == SERIES_MAX:
            break
    return values


def _number(text: bytes) -> float:
    """Returns the number in the first word; a timestamp may follow."""
    words = text.split(None, 1)
    if not words or len(words[0]) > 32:
        return UNKNOWN
    try:
        value = float(words[0])
    except ValueError:
        return UNKNOWN
    return value if math.isfinite(value) and value >= 0 else UNKNOWN
