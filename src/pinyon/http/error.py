"""Errors that exist in HTTP only."""

from __future__ import annotations

from collections.abc import Mapping

from pinyon.core.errors import PinyonError


class HttpError(PinyonError):
    """An error with an HTTP status and the header fields that go with it."""

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[bytes, bytes] | None = None,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status
        self.headers = dict(headers or {})


def invalid() -> HttpError:
    """Returns the error for received bytes that are not valid HTTP."""
    return HttpError(400, "Invalid HTTP request received.")
