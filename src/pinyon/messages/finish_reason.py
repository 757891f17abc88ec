"""Reasons why a generation ended."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.core.request import FinishReason

_NUMBERS: dict[FinishReason, common_pb2.FinishReason] = {
    each: getattr(common_pb2, f"FINISH_REASON_{each.name}") for each in FinishReason
}
_REASONS: dict[int, FinishReason] = {number: reason for reason, number in _NUMBERS.items()}


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason:
    return _NUMBERS[reason]


def finish_reason_from_proto(number: int) -> FinishReason | None:
    """Returns the reason; None if the generation has not ended or the reason is not known here."""
    return _REASONS.get(number)
