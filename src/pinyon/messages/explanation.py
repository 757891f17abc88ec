"""Why a request was placed where it was, and what instances measure of it."""

from __future__ import annotations

from math import isfinite

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.messages.placement import placement_to_proto
from pinyon.placement.decision_log import FirstToken, LoggedDecision
from pinyon.placement.explanation import Candidate, Explanation

NAME_CHARS_MAX = 128
TIMES = ("room", "queue", "transfer", "prefill", "drain", "ttft", "others")
"""Of a candidate: seconds in the value, milliseconds in the message."""
US_MAX = 3_600_000_000
"""An hour; what is longer is a broken clock."""


def explained_to_proto(
    logged: LoggedDecision, explanation: Explanation, age_s: float
) -> conductor_pb2.ExplainedDecision:
    """``age_s``: since the decision."""
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
        message.placement.CopyFrom(placement_to_proto(seen.decision, request.ttft_slo_s, logged.number))
        if seen.decision.alternate is not None:
            message.alternate_instance_id = seen.decision.alternate.info.instance_id
    if explanation.chosen is not None:
        message.chosen.CopyFrom(_candidate(explanation.chosen))
    if logged.code:
        message.error.CopyFrom(common_pb2.Error(code=logged.code, message=logged.error))
    if logged.first_token is not None:
        message.first_token.CopyFrom(
            conductor_pb2.FirstTokenMeasurement(placement_number=logged.number, **logged.first_token._asdict())
        )
    return message


def first_token_from_proto(message: conductor_pb2.FirstTokenMeasurement) -> FirstToken:
    """An instance's word: shown and counted, nothing is decided by it."""
    return FirstToken(
        message.prefill_instance_id[:NAME_CHARS_MAX],
        *(_time(message.ttft_us), _time(message.queue_us), _time(message.fetch_us), _time(message.compute_us)),
        *(_time(message.push_us), message.computed_tokens, message.local_tokens, message.peer_tokens),
        message.store_tokens,
    )


def _time(us: int) -> int:
    """What is no time is none."""
    return us if us <= US_MAX else 0


def _candidate(each: Candidate) -> conductor_pb2.Candidate:
    times_ms = {f"{name}_ms": getattr(each, f"{name}_s") * 1e3 for name in TIMES}
    return conductor_pb2.Candidate(
        instance_id=each.instance_id,
        held_blocks=each.held_blocks,
        expected_blocks=each.expected_blocks,
        fetched_blocks=each.fetched_blocks,
        about=each.about,
        **times_ms,
    )
