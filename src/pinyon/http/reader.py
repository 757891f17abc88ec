"""The bytes that a connection has received, read request by request. No I/O: bytes in, heads and bodies out.

Bytes behind the current request are not examined: a pipelined request stays bytes until its turn. The chunked transfer
coding (RFC 9112 §7.1) is read strictly: input that two readers could read differently is an error."""

from __future__ import annotations

import re

from pinyon.http.answer import HttpError, invalid
from pinyon.http.budget import HttpLimits
from pinyon.http.request import RequestHead, parse_head

TURN_BYTES = 64 << 10
"""The maximum bytes of a chunked body that one call reads, so that one-byte chunks cannot stall other clients."""

SIZE_LINE_MAX = 256
EXTENSIONS_MAX = 16 << 10
TRAILERS_MAX = 8 << 10
"""Limits per message in bytes. Extensions and trailers have no meaning here: they are read, counted and dropped."""

_BLANK = re.compile(rb"(?:\r\n)*")
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,19}(?: |\Z)")
_BARE_LF = re.compile(rb"(?<!\r)\n")
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
        input, 413 as soon as the declared chunks exceed the limit together, 431 for too many bytes of trailers."""
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


class RequestReader:
    """A reader of requests. Use: ``receive``, ``head`` until not None, ``body`` until True, ``take_body``; repeat."""

    __slots__ = ("_body", "_chunks", "_data", "_discard", "_left", "_limits", "_searched", "_start", "turn_over")

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._data: bytes | bytearray = b""
        self._start = 0
        """The position in ``_data`` at which the unread bytes begin."""
        self._searched = 0
        self._left = 0
        self._chunks: ChunkReader | None = None
        self._body: bytes | bytearray = b""
        self._discard = False
        self.turn_over = False
        """True if :meth:`body` stopped to give others their turn, not for lack of bytes."""

    @property
    def unread(self) -> int:
        """The number of bytes received and not read yet."""
        return len(self._data) - self._start

    @property
    def held(self) -> int:
        """The number of bytes held: the body and the unread bytes."""
        return len(self._body) + len(self._data) - self._start

    def receive(self, data: bytes) -> None:
        if self._start == len(self._data):
            self._data = data
            self._start = self._searched = 0
            return
        if type(self._data) is bytes:
            self._data = bytearray(memoryview(self._data)[self._start :])
            self._searched = max(0, self._searched - self._start)
            self._start = 0
        self._data += data

    def drop(self) -> None:
        """Drops the unread bytes."""
        self._data, self._start, self._searched = b"", 0, 0

    def head(self) -> RequestHead | None:
        """Returns the next request's head; None if incomplete. Raises :class:`HttpError` as soon as it is invalid."""
        data = self._data
        start = self._start
        if start == len(data):
            return None
        if data[start] == 13:  # empty lines before a request are skipped
            start = self._move(_BLANK.match(data, start).end())  # type: ignore[union-attr]
            data = self._data
        end = data.find(b"\r\n\r\n", max(start, self._searched - 3))
        if end < 0:
            self._check_unfinished(start)
            self._searched = len(data)
            return None
        if end + 4 - start > self._limits.head_bytes:
            raise self._head_too_large()
        head = parse_head(bytes(data[start : end + 4]), self._limits)
        self._move(end + 4)
        self._discard = self.turn_over = False
        self._left = max(0, head.content_length)
        self._chunks = ChunkReader(self._limits.body_bytes) if head.content_length < 0 else None
        self._body = b"" if self._chunks is None else bytearray()
        return head

    def _check_unfinished(self, start: int) -> None:
        """Raises :class:`HttpError` if the incomplete head can no longer become a valid one."""
        data, limits = self._data, self._limits
        size = len(data) - start
        if not size or (size == 1 and data[start] == 13):
            return
        if not _METHOD.match(data[start : start + 21]) or _BARE_LF.search(data, max(start, self._searched - 1)):
            raise invalid()
        if size > limits.line_bytes and data.find(b"\r\n", start, start + limits.line_bytes + 2) < 0:
            raise HttpError(414, f"The request line is longer than {limits.line_bytes} bytes.")
        if size >= limits.head_bytes:
            raise self._head_too_large()

    def body(self) -> bool:
        """Reads on and returns whether the body is complete. Raises :class:`HttpError`."""
        if self._chunks is not None:
            end = min(len(self._data), self._start + TURN_BYTES)
            self.turn_over = end < len(self._data)
            into = None if self._discard else self._body
            self._move(self._chunks.read(self._data, self._start, end, into))  # type: ignore[arg-type]
            return self._chunks.done
        left, start = self._left, self._start
        if not left:
            return True
        taken = min(left, len(self._data) - start)
        if taken and not self._discard:
            if taken == left and not self._body:
                self._body = bytes(memoryview(self._data)[start : start + taken])
            else:
                if type(self._body) is bytes:
                    self._body = bytearray()
                self._body += memoryview(self._data)[start : start + taken]
        self._left = left - taken
        self._move(start + taken)
        return not self._left

    def discard(self) -> None:
        """Drops the body read so far, and the rest of it as it arrives."""
        self._discard = True
        self._body = b""

    def take_body(self) -> bytes | bytearray:
        body, self._body = self._body, b""
        return body

    def _move(self, start: int) -> int:
        """Marks the unread bytes as beginning at ``start``; returns their position after read bytes are removed."""
        data = self._data
        if start == len(data):
            self.drop()
            return 0
        if type(data) is bytearray:
            del data[:start]
            start = 0
        self._start = self._searched = start
        return start

    def _head_too_large(self) -> HttpError:
        return HttpError(431, f"The request's head is larger than {self._limits.head_bytes} bytes.")


def _too_long() -> HttpError:
    return HttpError(431, f"The request has more than {TRAILERS_MAX} bytes of trailers.")
