"""Answers as bytes, and what a handler writes them to."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

from pinyon.core.errors import PinyonError
from pinyon.http.error import HttpError

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STREAM = -1
"""The length of an answer whose length is not known."""

_STATUS_LINES = {int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


class Reply(Protocol):
    """One request's answer: ``whole``, or ``begin``, ``send`` as often as wanted, ``end``."""

    @property
    def begun(self) -> bool:
        """It is too late for another status."""
        ...

    def whole(self, status: int, body: bytes, content_type: bytes = JSON, fields: bytes = b"") -> None: ...

    def begin(self, content_type: bytes, fields: bytes = b"", status: int = 200, length: int = STREAM) -> None:
        """It leaves with the first data."""
        ...

    async def send(self, data: bytes) -> None:
        """Some, not nothing. Waits while the client is behind."""
        ...

    def push(self, data: bytes) -> bool:
        """As :meth:`send`, at once; False: the client is behind, and nothing was sent."""
        ...

    async def end(self, data: bytes) -> None:
        """The last of it, which may be nothing."""
        ...


def field(name: bytes, value: str | bytes) -> bytes:
    """One header field. Neither part may hold a line's end: what a client sent is checked before."""
    return b"%b: %b\r\n" % (name, value.encode("ascii") if isinstance(value, str) else value)


def answer_head(
    status: int, date: bytes, content_type: bytes, length: int, fields: bytes, *, close: bool, chunked: bool
) -> bytes:
    """``date`` and ``fields`` are whole lines."""
    return b"%b%b%b%b%b%b%b\r\n" % (
        _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
        date,
        b"content-type: %b\r\n" % content_type if content_type else b"",
        b"content-length: %d\r\n" % length if length != STREAM else b"",
        fields,
        b"connection: close\r\n" if close else b"",
        b"transfer-encoding: chunked\r\n" if chunked else b"",
    )


def error_status(error: PinyonError) -> int:
    return error.status if isinstance(error, HttpError) else error.http_status
