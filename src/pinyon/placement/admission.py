"""Rejection of what cannot be served in time (Mooncake Algorithm 1, lines 18 and 19)."""

from __future__ import annotations

from pinyon.core.errors import Rejected
from pinyon.placement.policy import PlacementDecision, PlacementRequest

__all__ = ["is_late", "is_slow", "rejection"]

RETRY_MIN_S = 0.05
RETRY_MAX_S = 60.0
# A batch shrinks when requests end, which nothing here foresees.
TBT_RETRY_S = 1.0


def is_late(request: PlacementRequest, decision: PlacementDecision) -> bool:
    """The predicted time to first token exceeds its SLO."""
    return 0 < request.ttft_slo_s < decision.ttft_s


def is_slow(request: PlacementRequest, decision: PlacementDecision) -> bool:
    """The predicted time between tokens exceeds its SLO."""
    return 0 < request.tbt_slo_s < decision.tbt_s


def rejection(request: PlacementRequest, decision: PlacementDecision) -> Rejected:
    """Why a decision that is late or slow is not taken.

    For the TTFT the retry hint says when enough of the waits will be over. A request too long for its SLO
    even on an idle instance gets no hint: trying again does not help.
    """
    if is_late(request, decision):
        hint: float | None = None
        if decision.transfer_s + decision.prefill_s <= request.ttft_slo_s:
            hint = min(RETRY_MAX_S, max(RETRY_MIN_S, decision.ttft_s - request.ttft_slo_s))
        return Rejected(
            f"predicted time to first token {decision.ttft_s:.2f} s exceeds the limit of {request.ttft_slo_s:.2f} s",
            retry_after_s=hint,
        )
    return Rejected(
        f"predicted time between tokens {decision.tbt_s * 1e3:.0f} ms exceeds the limit of "
        f"{request.tbt_slo_s * 1e3:.0f} ms",
        retry_after_s=TBT_RETRY_S,
    )
