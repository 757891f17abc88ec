"""What came of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Served", "report"]

LONGEST = 0.1
"""Of the requests, by prompt: whom a policy may starve to look good."""


class Served(NamedTuple):
    """One request, in order of arrival."""

    arrived_s: float
    instance: int
    started_s: float
    ttft_s: float
    tokens: int
    hit_tokens: int


def report(served: Sequence[Served], slo_s: float, warm_up: int) -> dict[str, float]:
    """The first ``warm_up`` do not count. A percentile is the value at index floor(p · n) of n in order; the hit ratio
    is by tokens. Beside the attainment of all stand that of the last quarter by arrival, which falls where a queue
    grows, and that of the tenth with the longest prompts."""
    counted = served[warm_up:]
    if not counted:
        return {"requests": len(served), "counted": 0}
    times = sorted(each.ttft_s for each in counted)
    longest = sorted(counted, key=lambda each: each.tokens)[-max(1, int(LONGEST * len(counted))) :]
    return {
        "requests": len(served),
        "counted": len(counted),
        "attainment": _attained(counted, slo_s),
        "mean_s": sum(times) / len(times),
        **{f"p{percent}_s": times[percent * len(times) // 100] for percent in (50, 90, 99)},
        "hit_ratio": sum(each.hit_tokens for each in counted) / sum(each.tokens for each in counted),
        "attainment_last_quarter": _attained(counted[-max(1, len(counted) // 4) :], slo_s),
        "attainment_longest_tenth": _attained(longest, slo_s),
    }


def _attained(served: Sequence[Served], slo_s: float) -> float:
    return sum(each.ttft_s <= slo_s for each in served) / len(served)
