"""Errors as values: inside streams that must live on, and in the metadata of failed calls."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import PinyonError, error_from_code

__all__ = ["error_from_proto", "error_to_proto"]


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
