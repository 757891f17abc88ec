"""The chunked transfer coding (RFC 9112 §7.1), strictly: input that two readers could read differently is an error."""

from __future__ import annotations

import re

from pinyon.http.answer import HttpError, invalid

SIZE_LINE_MAX = 256
EXTENSIONS_MAX = 16 << 10
TRAILERS_MAX = 8 << 10
"""Limits per message in bytes. Extensions and trailers have no meaning here: they are read, counted and dropped."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e]|\\[\t\x20-\x7e])*"'
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;%b(?:=(?:%b|%b))?)*" % (_TOKEN, _TOKEN, _QUOTED))
_FIELD = re.compile(rb"%b:[\t\x20-\x7e\x80-\xff]*" % _TOKEN)


class ChunkReader:
    """A reader of one chunked body: call ``read`` until ``done``. ``size`` sums up the chunk sizes declared so far."""

    __slots__ = ("_behind_data", "_dropped", "_in_trailers", "_left", "_limit", "done", "size")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._left = 0
        self._behind_data = False
        self._in_trailers = False
        self._dropped = 0
        self.size = 0
        self.done = False

    def read(self, data: bytes | bytearray, start: int, end: int, body: bytearray | None) -> int:
        """Reads ``data[start:end]`` as far as possible and returns the position at which to continue.

        Appends the content to ``body``, or drops it if ``body`` is None. Raises :class:`HttpError`: 400 for invalid
        input, 413 as soon as the declared chunks exceed the limit together, 431 for too many bytes of trailers.
        """
        while start < end:
            if self._left:
                taken = min(self._left, end - start)
                if body is not None:
                    body += data[start : start + taken]
                start += taken
                self._left -= taken
                continue
            line_end = data.find(b"\r\n", start, end)
            if line_end < 0:
                if data.find(b"\n", start, end) >= 0:
                    raise invalid()
                if end - start > (TRAILERS_MAX if self._in_trailers else SIZE_LINE_MAX):
                    raise _too_long() if self._in_trailers else invalid()
                break
            line = bytes(data[start:line_end])
            start = line_end + 2
            if self._behind_data:
                if line:
                    raise invalid()
                self._behind_data = False
            elif self._in_trailers:
                self._trailer(line)
                if self.done:
                    break
            else:
                self._size_line(line)
        return start

    def _size_line(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None or len(line) > SIZE_LINE_MAX:
            raise invalid()
        digits = match[1]
        self._dropped += len(line) - len(digits)
        if self._dropped > EXTENSIONS_MAX:
            raise invalid()
        self._left = int(digits, 16)
        self.size += self._left
        if self.size > self._limit:
            raise HttpError(413, f"The request's body is larger than {self._limit} bytes.")
        if self._left:
            self._behind_data = True
        else:
            self._in_trailers = True
            self._dropped = 0

    def _trailer(self, line: bytes) -> None:
        if not line:
            self.done = True
            return
        self._dropped += len(line) + 2
        if self._dropped > TRAILERS_MAX:
            raise _too_long()
        if not _FIELD.fullmatch(line):
            raise invalid()


def _too_long() -> HttpError:
    return HttpError(431, f"The request has more than {TRAILERS_MAX} bytes of trailers.")
