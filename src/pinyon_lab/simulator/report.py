"""The outcome of simulated requests, and the report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pinyon_lab.simulator.attempt import SimRequest

FINISHED = "finished"


class RequestOutcome(NamedTuple):
    """The outcome of one request, in order of the trace. Times in seconds; -1: there is no such time."""

    arrived_s: float
    """The time at which the client sent the request."""
    prefill: str
    decode: str
    ttft_s: float
    tbt_s: float
    """The mean of the longest tenth of the times between tokens (Mooncake §5.1); 0: there is one token."""
    e2e_s: float
    tokens: int
    output_tokens: int
    hit_tokens: int
    """The prompt tokens that the prefill instance held."""
    fetched_tokens: int
    prefill_s: float
    """The time of steps with the prompt."""
    attempts: int
    end: str

    @classmethod
    def of(cls, request: SimRequest, prefill: str, decode: str) -> RequestOutcome:
        arrived_s, first_s = request.arrived_s, request.first_token_s
        ttft_s = first_s - arrived_s if first_s >= 0 else -1.0
        times = ttft_s, longest_tenth(request.intervals), request.ended_s - arrived_s
        tokens = request.tokens, request.generated, request.hit_tokens, request.fetched_tokens
        rest = request.computing_s, request.attempts, request.ends[-1]
        return cls(arrived_s, prefill, decode, *times, *tokens, *rest)


def longest_tenth(intervals: Sequence[tuple[float, int]]) -> float:
    """Returns the mean of the longest tenth, at least one, of intervals given as ``(seconds, number of such)``."""
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


LONGEST = 0.1
"""The share of requests, by prompt length, that a policy may starve to look good."""
PERCENTS = (50, 90, 99)
NANO_S = 1e-9
"""The tolerance of comparisons: times are sums, and rounding must not decide which request is late."""


class ServedRequest(NamedTuple):
    """The outcome of one request, in order of arrival."""

    arrived_s: float
    instance: int
    started_s: float
    ttft_s: float
    tokens: int
    hit_tokens: int


def report(served: Sequence[ServedRequest | RequestOutcome], slo_s: float, warm_up: int) -> dict[str, float]:
    """Returns the measures of a run, in which the first ``warm_up`` requests do not count.

    A percentile is the value at index floor(p · n) of n in order; the hit ratio is by tokens. Beside the attainment of
    all stand that of the last quarter by arrival, which falls where a queue grows, and that of the tenth with the
    longest prompts. A request without an answer is not in time, and in no percentile."""
    counted = served[warm_up:]
    times = sorted(each.ttft_s for each in counted if each.ttft_s >= 0)
    if not times:
        return {"requests": len(served), "counted": len(counted), "attainment": 0.0}
    longest = sorted(counted, key=lambda each: each.tokens)[-max(1, int(LONGEST * len(counted))) :]
    return {
        "requests": len(served),
        "counted": len(counted),
        "attainment": _attained(counted, slo_s),
        "mean_s": sum(times) / len(times),
        **_percentiles("", times),
        "hit_ratio": sum(each.hit_tokens for each in counted) / sum(each.tokens for each in counted),
        "attainment_last_quarter": _attained(counted[-max(1, len(counted) // 4) :], slo_s),
        "attainment_longest_tenth": _attained(longest, slo_s),
    }


def cluster_report(
    outcomes: Sequence[RequestOutcome], slo_s: float, tbt_slo_s: float, warm_up: int
) -> dict[str, float]:
    """Returns :func:`report` with the times between tokens (of a request, the mean of its longest tenth). It adds the
    share of *effective* requests: finished, with TTFT and TBT in time (Mooncake §5.1)."""
    result = report(outcomes, slo_s, warm_up)
    counted = outcomes[warm_up:]
    finished = [each for each in counted if each.end == FINISHED]
    if not finished:
        return result
    tbts = sorted(each.tbt_s for each in finished)
    used = {each.prefill for each in counted if each.prefill}  # unknown to clients
    if used:
        result["instances_used"] = len(used)
    span_s = max(each.arrived_s + each.e2e_s for each in counted) - min(each.arrived_s for each in counted)
    return result | {
        "finished": len(finished) / len(counted),
        "fetched_ratio": sum(each.fetched_tokens for each in counted) / sum(each.tokens for each in counted),
        **_percentiles("tbt_", tbts),
        "tbt_attainment": sum(each.tbt_s <= tbt_slo_s + NANO_S for each in finished) / len(counted),
        "effective": sum(each.ttft_s <= slo_s + NANO_S and each.tbt_s <= tbt_slo_s + NANO_S for each in finished)
        / len(counted),
        "e2e_mean_s": sum(each.e2e_s for each in finished) / len(finished),
        "output_tokens_per_s": sum(each.output_tokens for each in counted) / span_s if span_s > 0 else 0.0,
    }


def _percentiles(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}p{percent}_s": values[percent * len(values) // 100] for percent in PERCENTS}


def _attained(served: Sequence[ServedRequest | RequestOutcome], slo_s: float) -> float:
    return sum(0 <= each.ttft_s <= slo_s + NANO_S for each in served) / len(served)
