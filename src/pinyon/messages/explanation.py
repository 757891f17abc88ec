"""Explanations why a request was placed where it was."""

from __future__ import annotations

from math import isfinite

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.messages.placement import fill_placement
from pinyon.messages.prefill_report import first_token_to_proto
from pinyon.placement.decision_log import LoggedDecision
from pinyon.placement.explanation import Candidate, Explanation

_PARTS = ("room", "queue", "transfer", "prefill", "drain", "ttft", "others")
"""Durations of a candidate: seconds in the value, milliseconds in the message."""


def explained_to_proto(
    logged: LoggedDecision, explanation: Explanation, age_s: float
) -> conductor_pb2.ExplainedDecision:
    """Returns a logged decision with its explanation; ``age_s`` is the time since the decision."""
    request = logged.request
    message = conductor_pb2.ExplainedDecision(
        request_id=request.request_id,
        age_ms=max(0, round(age_s * 1e3)),
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        kind=logged.kind,
        turn=logged.turn,
        priority=logged.priority,
        no_reuse=request.no_reuse,
        exclude_instance_ids=sorted(request.exclude),
        because=explanation.because,
        probe=explanation.probe,
        tbt_limit_ms=request.tbt_slo_s * 1e3,
        others=[_candidate(each) for each in explanation.others],
        candidates=explanation.could,
    )
    if (seen := logged.seen) is not None:
        limit_s = request.ttft_limit_s(seen.decision.own_s)
        message.ttft_limit_ms = limit_s * 1e3 if isfinite(limit_s) else 0.0
        message.shared_blocks = seen.decision.shared_blocks
        message.block_tokens = seen.pool.layout.block_tokens
        fill_placement(message.placement, seen.decision, request.ttft_slo_s, logged.number)
        if seen.decision.alternate is not None:
            message.alternate_instance_id = seen.decision.alternate.info.instance_id
    if explanation.chosen is not None:
        message.chosen.CopyFrom(_candidate(explanation.chosen))
    if logged.code:
        message.error.CopyFrom(common_pb2.Error(code=logged.code, message=logged.error))
    if logged.first_token is not None:
        message.first_token.CopyFrom(first_token_to_proto(logged.number, logged.first_token))
    return message


def _candidate(each: Candidate) -> conductor_pb2.Candidate:
    return conductor_pb2.Candidate(
        instance_id=each.instance_id,
        held_blocks=each.held_blocks,
        expected_blocks=each.expected_blocks,
        fetched_blocks=each.fetched_blocks,
        about=each.about,
        **{f"{part}_ms": getattr(each, f"{part}_s") * 1e3 for part in _PARTS},
    )
