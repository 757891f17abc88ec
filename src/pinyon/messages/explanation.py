"""Why a request was placed where it was, and what instances measure of it."""

from __future__ import annotations

from math import isfinite

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.messages.placement import placement_to_proto
from pinyon.placement.decision_log import FirstToken, LoggedDecision
from pinyon.placement.explanation import Candidate, Explanation

NAME_CHARS_MAX = 128
US_MAX = 3_600_000_000
"""An hour; what is longer is a broken clock."""


def explained_to_proto(
    logged: LoggedDecision, explanation: Explanation, age_s: float
) -> conductor_pb2.ExplainedDecision:
    """``age_s``: since the decision."""
    message = conductor_pb2.ExplainedDecision(
        request_id=logged.request_id,
        age_ms=max(0, round(age_s * 1e3)),
        model=logged.model,
        prompt_tokens=logged.prompt_tokens,
        max_tokens=logged.max_tokens,
        kind=logged.kind,
        turn=logged.turn,
        priority=logged.priority,
        no_reuse=logged.no_reuse,
        exclude_instance_ids=sorted(logged.exclude),
        because=explanation.because,
        probe=explanation.probe,
        tbt_limit_ms=logged.tbt_slo_s * 1e3,
        others=[_candidate(each) for each in explanation.others],
        candidates=explanation.could,
    )
    if (seen := logged.seen) is not None:
        limit_s = logged.request.ttft_limit_s(seen.decision.own_s)
        message.ttft_limit_ms = limit_s * 1e3 if isfinite(limit_s) else 0.0
        message.shared_blocks = seen.decision.shared_blocks
        message.block_tokens = seen.pool.layout.block_tokens
        message.placement.CopyFrom(placement_to_proto(seen.decision, logged.ttft_slo_s, logged.number))
        if seen.decision.alternate is not None:
            message.alternate_instance_id = seen.decision.alternate.info.instance_id
    if explanation.chosen is not None:
        message.chosen.CopyFrom(_candidate(explanation.chosen))
    if logged.code:
        message.error.CopyFrom(common_pb2.Error(code=logged.code, message=logged.error))
    if logged.first_token is not None:
        message.first_token.CopyFrom(_first_token(logged.number, logged.first_token))
    return message


def first_token_from_proto(message: conductor_pb2.FirstTokenMeasurement) -> FirstToken:
    """An instance's word: shown and counted, nothing is decided by it."""
    return FirstToken(
        message.prefill_instance_id[:NAME_CHARS_MAX],
        _part_s(message.ttft_us),
        _part_s(message.queue_us),
        _part_s(message.fetch_us),
        _part_s(message.compute_us),
        _part_s(message.push_us),
        message.computed_tokens,
        message.local_tokens,
        message.peer_tokens,
        message.store_tokens,
    )


def _part_s(us: int) -> float:
    """Seconds; what is no time is none: it must fit into an answer again."""
    return us * 1e-6 if us <= US_MAX else 0.0


def _first_token(number: int, value: FirstToken) -> conductor_pb2.FirstTokenMeasurement:
    return conductor_pb2.FirstTokenMeasurement(
        placement_number=number,
        ttft_us=round(value.ttft_s * 1e6),
        prefill_instance_id=value.prefill_instance_id,
        queue_us=round(value.queue_s * 1e6),
        fetch_us=round(value.fetch_s * 1e6),
        compute_us=round(value.compute_s * 1e6),
        push_us=round(value.push_s * 1e6),
        computed_tokens=value.computed_tokens,
        local_tokens=value.local_tokens,
        peer_tokens=value.peer_tokens,
        store_tokens=value.store_tokens,
    )


def _candidate(each: Candidate) -> conductor_pb2.Candidate:
    return conductor_pb2.Candidate(
        instance_id=each.instance_id,
        held_blocks=each.held_blocks,
        expected_blocks=each.expected_blocks,
        fetched_blocks=each.fetched_blocks,
        room_ms=each.room_s * 1e3,
        queue_ms=each.queue_s * 1e3,
        transfer_ms=each.transfer_s * 1e3,
        prefill_ms=each.prefill_s * 1e3,
        drain_ms=each.drain_s * 1e3,
        ttft_ms=each.ttft_s * 1e3,
        others_ms=each.others_s * 1e3,
        about=each.about,
    )
