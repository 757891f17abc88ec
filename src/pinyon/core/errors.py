"""The tree of errors below :class:`PinyonError`, with gRPC codes and HTTP statuses.

- InvalidArgument (INVALID_ARGUMENT, 400): the caller's input is wrong (names the field)
- Unauthenticated (UNAUTHENTICATED, 401): no or wrong credentials
- PermissionDenied (PERMISSION_DENIED, 403): the caller is known and may not do this
- NotFound (NOT_FOUND, 404): unknown model, key, request
- ResourceExhausted (RESOURCE_EXHAUSTED, 429): over a limit; may carry a retry hint
  - Rejected (RESOURCE_EXHAUSTED, 429): no placement meets the SLO (Mooncake §4)
- FailedPrecondition (FAILED_PRECONDITION, 409): right request, wrong state
- Cancelled (CANCELLED, 499): the caller went away or asked to stop
- DeadlineExceeded (DEADLINE_EXCEEDED, 504): the request's time is up
- Unavailable (UNAVAILABLE, 503): a peer is gone or draining; safe to try elsewhere
- Internal (INTERNAL, 500): a defect of ours

Each class carries its wire codes, so the edges translate by attribute and never by ``isinstance`` chains."""

from __future__ import annotations

from typing import ClassVar


class PinyonError(Exception):
    """The base of all errors that pinyon raises on purpose.

    ``message`` is safe to show to the caller: it never contains another tenant's data or a stack trace."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgument(PinyonError):
    """The caller's input is wrong; ``field`` names the field."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class Unauthenticated(PinyonError):
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(PinyonError):
    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class NotFound(PinyonError):
    grpc_code = "NOT_FOUND"
    http_status = 404


class ResourceExhausted(PinyonError):
    """A limit is exceeded. ``retry_after_s`` says when trying again may help."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429


class Rejected(ResourceExhausted):
    """The error when no placement meets the SLO (Mooncake Algorithm 1, lines 18 and 19)."""


class FailedPrecondition(PinyonError):
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class Cancelled(PinyonError):
    grpc_code = "CANCELLED"
    http_status = 499


class DeadlineExceeded(PinyonError):
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Unavailable(PinyonError):
    grpc_code = "UNAVAILABLE"
    http_status = 503


class Internal(PinyonError):
    grpc_code = "INTERNAL"
    http_status = 500


_BY_CODE: dict[str, type[PinyonError]] = {each.grpc_code: each for each in PinyonError.__subclasses__()}


def error_from_code(
    code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
) -> PinyonError:
    """Returns the error that a peer reported by gRPC code name; an unknown code becomes :class:`Internal`."""
    return _BY_CODE.get(code, Internal)(message, field=field, retry_after_s=retry_after_s)
