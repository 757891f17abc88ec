"""The role of an instance."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import Role

_NUMBERS: dict[Role, common_pb2.Role] = {each: getattr(common_pb2, f"ROLE_{each.name}") for each in Role}
_ROLES: dict[int, Role] = {number: role for role, number in _NUMBERS.items()}


def role_to_proto(role: Role) -> common_pb2.Role:
    return _NUMBERS[role]


def role_from_proto(number: int) -> Role | None:
    """Returns the role; None if it is unspecified."""
    if number == common_pb2.ROLE_UNSPECIFIED:
        return None
    if number not in _ROLES:
        raise InvalidArgument(f"no such role: {number}", field="role")
    return _ROLES[number]
