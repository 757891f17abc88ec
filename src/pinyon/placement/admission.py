"""Rejection of what cannot be served in time (Mooncake Algorithm 1, lines 18 and 19)."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.core.errors import Rejected
from pinyon.placement.policy import PlacementDecision, PlacementRequest

RETRY_MIN_S = 0.05
RETRY_MAX_S = 60.0
# A batch shrinks when requests end, which nothing here foresees.
TBT_RETRY_S = 1.0
_WHERE = "name a longer limit (HTTP header x-pinyon-ttft-slo-ms, gRPC field ttft_slo_ms)"


def is_late(request: PlacementRequest, decision: PlacementDecision) -> bool:
    """The predicted time to first token exceeds its SLO."""
    return decision.ttft_s > request.ttft_limit_s(decision.own_s)


def is_slow(request: PlacementRequest, decision: PlacementDecision) -> bool:
    """The predicted time between tokens exceeds its SLO."""
    return 0 < request.tbt_slo_s < decision.tbt_s


def rejection(request: PlacementRequest, decisions: Sequence[PlacementDecision]) -> Rejected:
    """Why none of the decisions, which are all late or slow, is taken.

    For the TTFT the retry hint says when enough of the waits will be over. A request too long for its own limit even
    where nobody waits gets no hint: trying again does not help, another limit does.
    """
    decision = min(decisions, key=lambda each: each.ttft_s)
    if not is_late(request, decision):
        return Rejected(
            f"predicted time between tokens {decision.tbt_s * 1e3:.0f} ms exceeds the limit of "
            f"{request.tbt_slo_s * 1e3:.0f} ms",
            retry_after_s=TBT_RETRY_S,
        )
    own_s = decision.own_s
    limit_s = request.ttft_limit_s(own_s)
    said = f"predicted time to first token {decision.ttft_s:.2f} s exceeds"
    if own_s > limit_s:
        return Rejected(
            f"{said} the request's own limit of {limit_s:g} s: {request.prompt_tokens} prompt tokens take "
            f"{own_s:.2f} s where nobody waits, so trying again does not help; {_WHERE}"
        )
    whose = "the request's own limit" if request.ttft_slo_named else "the conductor's limit (--ttft-slo-ms)"
    return Rejected(
        f"{said} {whose} of {limit_s:.3g} s: {decision.ttft_s - own_s:.2f} s of it are others' turn; try again later, "
        f"or {_WHERE}",
        retry_after_s=min(RETRY_MAX_S, max(RETRY_MIN_S, decision.ttft_s - limit_s)),
    )
