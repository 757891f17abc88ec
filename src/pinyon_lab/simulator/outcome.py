"""What came of one simulated request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pinyon_lab.simulator.attempt import Request

FINISHED = "finished"


class Outcome(NamedTuple):
    """A request, in order of the trace. Times in seconds; -1: it has none."""

    arrived_s: float
    """When it was sent."""
    prefill: str
    decode: str
    ttft_s: float
    tbt_s: float
    """Mean of the longest tenth of the times between its tokens (Mooncake §5.1); 0: it has one token."""
    e2e_s: float
    tokens: int
    output_tokens: int
    hit_tokens: int
    """Held where the prompt was computed."""
    fetched_tokens: int
    prefill_s: float
    """Of steps with its prompt."""
    attempts: int
    end: str

    @classmethod
    def of(cls, request: Request, prefill: str, decode: str) -> Outcome:
        arrived_s, first_s = request.arrived_s, request.first_token_s
        return cls(
            arrived_s,
            prefill,
            decode,
            first_s - arrived_s if first_s >= 0 else -1.0,
            longest_tenth(request.intervals),
            request.ended_s - arrived_s,
            request.tokens,
            request.generated,
            request.hit_tokens,
            request.fetched_tokens,
            request.computing_s,
            request.attempts,
            request.ends[-1],
        )


def longest_tenth(intervals: Sequence[tuple[float, int]]) -> float:
    """Mean of the longest tenth, at least one, of ``(seconds, how many such)``."""
    count = sum(times for _, times in intervals)
    if not count:
        return 0.0
    left = most = max(1, count // 10)
    total = 0.0
    for seconds, times in sorted(intervals, reverse=True):
        taken = min(left, times)
        total += taken * seconds
        left -= taken
        if not left:
            break
    return total / most
