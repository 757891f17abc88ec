"""The head of an HTTP request: request line, header fields and the framing of the body.

llhttp (through httptools) reads the bytes, strictly: no bare LF, no folded lines, no NUL, no second Content-Length, no
Content-Length beside Transfer-Encoding. This module checks what llhttp leaves to its users."""

from __future__ import annotations

import re
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from pinyon.http.answer import HttpError, invalid
from pinyon.http.budget import HttpLimits

_LINE = re.compile(rb"[A-Z][A-Z-]{0,19} [\x21-\x7e]+ HTTP/[0-9]\.[0-9]\r\n")
_DIGITS = re.compile(rb"[0-9]{1,18}")


class RequestHead:
    """A request's head; names in ``fields`` are lower case. ``content_length`` is 0 for no body, -1 for a chunked
    one."""

    __slots__ = ("close", "content_length", "content_type", "expects_continue", "fields", "method", "old", "path",
                 "target")  # fmt: skip

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.path = ""
        self.fields: list[tuple[bytes, bytes]] = []
        self.content_length = 0
        self.content_type = b""
        self.expects_continue = False
        self.close = False
        """True if the client wants no further answer on this connection."""
        self.old = False
        """True for HTTP/1.0, which has no chunked and no interim answers."""

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))


def parse_head(raw: bytes, limits: HttpLimits) -> RequestHead:
    """Returns the parsed head; ``raw`` ends with the empty line. Raises :class:`HttpError`: 400, 414, 431, 501, 505."""
    line_end = raw.find(b"\r\n")
    if line_end > limits.line_bytes:
        raise HttpError(414, f"The request line is longer than {limits.line_bytes} bytes.")
    if raw.count(b"\n") > limits.head_fields + 2:  # the request line and the empty one
        raise HttpError(431, f"The request has more than {limits.head_fields} header fields.")
    if not _LINE.match(raw):
        raise invalid()
    head = RequestHead()
    parser = HttpRequestParser(head)
    try:
        parser.feed_data(raw)
    except HttpParserUpgrade:
        pass  # the server speaks no other protocol, so the offer to upgrade is ignored
    except HttpParserError:
        raise invalid() from None
    version = parser.get_http_version()
    if version == "1.0":
        head.old = head.close = True
    elif version != "1.1":
        raise HttpError(505, "The HTTP version must be 1.0 or 1.1.")
    head.method = parser.get_method().decode("ascii")
    head.path = _path(head.target)
    _read_fields(head)
    return head


def _path(target: bytes) -> str:
    if target[:1] != b"/" and target != b"*":  # absolute form, or the authority form of CONNECT
        try:
            target = parse_url(target).path or b"/"
        except HttpParserError:
            raise invalid() from None
    path = target.partition(b"?")[0].partition(b"#")[0].decode("latin-1")
    return unquote(path) if "%" in path else path


def _read_fields(head: RequestHead) -> None:
    length, chunked, hosts, types = b"", False, 0, 0
    for name, value in head.fields:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = value.strip()
            if not _DIGITS.fullmatch(length):
                raise invalid()
        elif name == b"content-type":
            head.content_type = value
            types += 1
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise HttpError(501, "The only transfer coding that is understood is chunked.")
            chunked = True
        elif name == b"connection":
            head.close = head.close or b"close" in [option.strip() for option in value.lower().split(b",")]
        elif name == b"expect":
            head.expects_continue = not head.old and value.strip().lower() == b"100-continue"
    if hosts > 1 or (not hosts and not head.old):
        raise HttpError(400, "A request must have one Host header field.")
    if types > 1:
        raise HttpError(400, "A request must have one Content-Type header field at most.")
    if chunked:
        if head.old or length:
            raise invalid()
        head.content_length = -1
    elif length:
        head.content_length = int(length)
