"""The class of a request: its kind, and whose request it is."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import RequestClass


def class_to_proto(value: RequestClass) -> common_pb2.RequestClass:
    message = common_pb2.RequestClass(kind=value.kind, turn=value.turn, arrived_unix_s=value.arrived_unix_s)
    # Most requests set no other field, and setting a field takes time.
    if value.session:
        message.session = value.session
    if value.user:
        message.user = value.user
    if value.priority:
        message.priority = value.priority
    if value.tenant:
        message.tenant = value.tenant
    if value.geographies:
        message.geographies.extend(value.geographies)
    if value.cache_salt:
        message.cache_salt = value.cache_salt
    if value.no_store:
        message.no_store = True
    return message


def class_from_proto(message: common_pb2.RequestClass) -> RequestClass:
    """Returns the class of a request; an absent message gives the class of an unlabelled request."""
    try:
        return RequestClass(
            message.kind,
            message.turn or 1,
            message.session,
            message.user,
            message.priority,
            message.arrived_unix_s,
            message.tenant,
            tuple(message.geographies) if message.geographies else (),  # iterating even an empty field is slow
            message.cache_salt,
            message.no_store,
        )
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"request_class.{error.field}") from None
