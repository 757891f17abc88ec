"""Answers as bytes, errors that have a status of their own, and the interface to which handlers write answers."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Protocol

from pinyon.core.errors import PinyonError

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STREAM = -1
"""The value of ``length`` for an answer whose length is not known in advance."""

_STATUS_LINES = {int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


class Reply(Protocol):
    """The answer to one request: either ``whole``, or ``begin``, any number of ``send`` calls and ``end``."""

    @property
    def begun(self) -> bool:
        """True once the answer has begun, so that its status can no longer change."""
        ...

    def whole(self, status: int, body: bytes, content_type: bytes = JSON, fields: bytes = b"") -> None: ...

    def begin(self, content_type: bytes, fields: bytes = b"", status: int = 200, length: int = STREAM) -> None:
        """Sets the head of the answer; it leaves together with the first data."""
        ...

    async def send(self, data: bytes) -> None:
        """Sends data, which must not be empty, and waits while the client is behind."""
        ...

    def push(self, data: bytes) -> bool:
        """Sends data without waiting; returns False, with nothing sent, if the client is behind."""
        ...

    async def end(self, data: bytes) -> None:
        """Sends the last data, which may be empty, and ends the answer."""
        ...


def field(name: bytes, value: str | bytes) -> bytes:
    """Returns one header line. Neither part may contain a line break: input from clients must be checked before."""
    return b"%b: %b\r\n" % (name, value.encode("ascii") if isinstance(value, str) else value)


def answer_head(
    status: int, date: bytes, content_type: bytes, length: int, fields: bytes, *, close: bool, chunked: bool
) -> bytes:
    """Returns the head of an answer as bytes; ``date`` and ``fields`` are complete header lines."""
    return b"%b%b%b%b%b%b%b\r\n" % (
        _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
        date,
        b"content-type: %b\r\n" % content_type if content_type else b"",
        b"content-length: %d\r\n" % length if length != STREAM else b"",
        fields,
        b"connection: close\r\n" if close else b"",
        b"transfer-encoding: chunked\r\n" if chunked else b"",
    )


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


def error_status(error: PinyonError) -> int:
    return error.status if isinstance(error, HttpError) else error.http_status
