"""Admission: rejects requests that cannot be served in time (Mooncake Algorithm 1, lines 18 and 19), and places probes.

A probe is work that is placed although the estimates advise against it, so that they are measured again. An instance
that is believed to be slow gets no requests, and without requests nobody learns that it is fast by now (or that the
first sample was a hiccup). The same holds for fetching that is believed to be slower than computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pinyon.core.errors import Rejected
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool

RETRY_MIN_S = 0.05
RETRY_MAX_S = 60.0
# A batch shrinks when requests end, and nothing here predicts when that is.
TBT_RETRY_S = 1.0
PROBE_AFTER_S: Final = 5.0
"""An idle instance whose last measurement is this old takes one request, whatever is predicted for it."""
TRANSFER_PROBE_AFTER_S: Final = 60.0
"""The age of the last fetch measured, from which on predicted fetch times count less: by half after each further such
time. It is long because a probe slows a request that would have been in time anyway."""
_WHERE = "name a longer limit (HTTP header x-pinyon-ttft-slo-ms, gRPC field ttft_slo_ms)"


def is_late(request: PlacementRequest, decision: PlacementDecision) -> bool:
    """Returns whether the predicted time to first token exceeds the request's limit."""
    return decision.ttft_s > request.ttft_limit_s(decision.own_s)


def is_slow(request: PlacementRequest, decision: PlacementDecision) -> bool:
    """Returns whether the predicted time between tokens exceeds the request's SLO."""
    return 0 < request.tbt_slo_s < decision.tbt_s


def rejection(request: PlacementRequest, decisions: Sequence[PlacementDecision]) -> Rejected:
    """Returns the error that says why none of the decisions, which are all late or slow, is taken.

    For the TTFT, the retry hint says when enough of the wait will be over. A request that is too long for its own limit
    even where nobody waits gets no hint: another limit helps, trying again does not."""
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


def probe_pool(pool: Pool, now_s: float, *, prefills: bool, decodes: bool) -> Pool:
    """Returns the pool with only those prefill (``prefills``) or decode instances (``decodes``) that are due to be
    measured. Either may become empty."""
    return replace(
        pool,
        prefills=tuple(each for each in pool.prefills if _prefill_due(each, now_s)) if prefills else pool.prefills,
        decodes=tuple(each for each in pool.decodes if decode_due(each, now_s)) if decodes else pool.decodes,
    )


def transfer_doubt(reader: InstanceState, now_s: float) -> float:
    """Returns the share, at most 1, of a fetch's predicted time that counts in the comparison with computing."""
    age_s = now_s - reader.transfer_learned_s
    if age_s <= TRANSFER_PROBE_AFTER_S:
        return 1.0
    return float(0.5 ** (age_s / TRANSFER_PROBE_AFTER_S - 1))


def _prefill_due(state: InstanceState, now_s: float) -> bool:
    return state.prefill_idle and now_s - state.prefill_learned_s >= PROBE_AFTER_S


def decode_due(state: InstanceState, now_s: float) -> bool:
    """Returns whether the instance decodes nothing, and was last measured :data:`PROBE_AFTER_S` ago or earlier."""
    return not state.decoding_requests() and now_s - state.decode_learned_s >= PROBE_AFTER_S
