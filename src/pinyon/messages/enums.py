"""Words of enumerations and their numbers in messages."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import FinishReason, Role

Word = TypeVar("Word", bound=Enum)


def numbered(kind: type[Word], api: Any, prefix: str) -> tuple[dict[Word, Any], dict[int, Word]]:
    """Returns the numbers by word, as ``api`` names them ``PREFIX_WORD``, and the words by number."""
    numbers = {each: getattr(api, f"{prefix}_{each.name}") for each in kind}
    return numbers, {number: each for each, number in numbers.items()}


_ROLE_NUMBERS, _ROLES = numbered(Role, common_pb2, "ROLE")
_REASON_NUMBERS, _REASONS = numbered(FinishReason, common_pb2, "FINISH_REASON")


def role_to_proto(role: Role) -> common_pb2.Role:
    number: common_pb2.Role = _ROLE_NUMBERS[role]
    return number


def role_from_proto(number: int) -> Role | None:
    """Returns the role; None if it is unspecified."""
    if number == common_pb2.ROLE_UNSPECIFIED:
        return None
    if number not in _ROLES:
        raise InvalidArgument(f"no such role: {number}", field="role")
    return _ROLES[number]


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason:
    number: common_pb2.FinishReason = _REASON_NUMBERS[reason]
    return number


def finish_reason_from_proto(number: int) -> FinishReason | None:
    """Returns the reason; None if the generation has not ended or the reason is not known here."""
    return _REASONS.get(number)
