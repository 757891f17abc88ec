"""What a request is told that is refused or fails, as OpenAI's clients know it."""

from __future__ import annotations

from math import ceil

from pinyon.core.errors import PinyonError
from pinyon.frontdoor.rate_limits import RateLimited, rate_fields
from pinyon.http.answer import error_status, field
from pinyon.http.error import HttpError
from pinyon.openai.format import error_body

__all__ = ["error_answer"]


def error_answer(error: PinyonError) -> tuple[int, bytes, bytes]:
    """Returns status, OpenAI's error object and header fields. ``Retry-After`` is there only where trying again may
    help."""
    status = error_status(error)
    fields = b""
    if isinstance(error, HttpError):
        fields = b"".join(field(name, value) for name, value in error.headers.items())
    if isinstance(error, RateLimited):
        fields += rate_fields(error.levels)
    if error.retry_after_s is not None:
        fields += field(b"retry-after", b"%d" % max(1, ceil(error.retry_after_s)))
    if status == 401:
        fields += field(b"www-authenticate", b"Bearer")
    return status, error_body(error, status), fields
