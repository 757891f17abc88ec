"""Errors as messages: inside streams that must live on, and in the metadata of failed calls."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import PinyonError, error_from_code

ERROR_METADATA_KEY = "pinyon-error-bin"


def error_to_proto(error: PinyonError) -> common_pb2.Error:
    return common_pb2.Error(
        code=error.grpc_code,
        message=error.message,
        field=error.field or "",
        retry_after_ms=round((error.retry_after_s or 0) * 1000),
    )


def error_from_proto(message: common_pb2.Error) -> PinyonError:
    return error_from_code(
        message.code,
        message.message,
        field=message.field or None,
        retry_after_s=message.retry_after_ms / 1000 if message.retry_after_ms else None,
    )


def error_from_status(code: str, details: str, metadata: Iterable[tuple[str, str | bytes]]) -> PinyonError:
    """Returns the error that a peer raised, from the call's status code, its details and its metadata."""
    for key, value in metadata:
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                return error_from_proto(common_pb2.Error.FromString(value))
            except DecodeError:  # a peer's garbage is not our failure
                break
    return error_from_code(code, details or code)
