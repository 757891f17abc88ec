"""ASGI messages for answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from math import ceil
from typing import Any

from pinyon.core.errors import PinyonError
from services.lb.http_head import HttpError
from services.lb.openai_format import error_body
from services.lb.rate_limits import RateLimited, rate_headers

__all__ = ["JSON", "Message", "Receive", "Send", "answer", "refuse"]

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"


async def answer(
    send: Send, status: int, body: bytes, content_type: bytes = JSON, extra: Mapping[bytes, bytes] | None = None
) -> int:
    """One whole answer; returns the status."""
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if extra:
        headers += extra.items()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return status


async def refuse(send: Send, error: PinyonError, request_id: str) -> int:
    """OpenAI's error object with its status; only before an answer has begun. Returns the status."""
    status = error.http_status
    extra: dict[bytes, bytes] = {}
    if isinstance(error, HttpError):
        status = error.status
        extra.update(error.headers)
    if isinstance(error, RateLimited):
        extra.update(rate_headers(error.levels))
    if status in (429, 503) and (error.retry_after_s or not isinstance(error, RateLimited)):
        extra[b"retry-after"] = b"%d" % max(1, ceil(error.retry_after_s or 1))
    if status == 401:
        extra[b"www-authenticate"] = b"Bearer"
    if request_id:
        extra[b"x-request-id"] = request_id.encode("ascii")
    return await answer(send, status, error_body(error, status), JSON, extra)
