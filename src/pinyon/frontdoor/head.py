"""The fields that the load balancer reads from a request's head."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from xxhash import xxh3_128_hexdigest

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geographies, check_kind, check_label, check_priority
from pinyon.frontdoor.auth import PUBLIC
from pinyon.frontdoor.labels import Labels
from pinyon.http.answer import HttpError
from pinyon.http.request import RequestHead

SLO_MS_MAX = 1 << 31

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)
_YES_NO = {b"": False, b"0": False, b"false": False, b"1": True, b"true": True}

_process = secrets.token_hex(6)
_numbers = count(1)


def unique_id() -> str:
    """Returns an id that no process ever gives twice: ids end up in tables that several load balancers share."""
    return f"{_process}{next(_numbers):08x}"


def id_field(request_id: str = "") -> bytes:
    """Returns the answer's header field with the request's id, or with a new one."""
    return b"x-request-id: %b\r\n" % (request_id or unique_id()).encode("ascii")


def sane_id(value: str) -> str:
    """Returns a client's id for its request, or an empty string if it is not fit for any log."""
    return value if _REQUEST_ID.fullmatch(value) else ""


class Logged:
    """The facts about a request for the log. The client is told ``request_id``: its own id if that is sane. Inside, the
    request goes by ``unique``."""

    __slots__ = ("arrived_s", "broken", "facts", "holder", "request_id", "unique")

    def __init__(self, arrived_s: float = 0.0, sent_id: str = "") -> None:
        self.arrived_s = arrived_s
        """The arrival time of the head, by the clock that requests go by."""
        self.unique = unique_id()
        self.request_id = sent_id or self.unique
        self.holder = ""
        """The tenant that the request's bytes are counted against; empty for none."""
        self.facts: Callable[[], Mapping[str, Any]] | None = None
        """Returns the facts that only the handler knows; set once the body is parsed, called for written lines only."""
        self.broken = ""
        """The code of the error that ended an answer which had begun."""

    @property
    def log_id(self) -> str:
        """The id on all hops: unique, and it contains the id that the client was told."""
        return self.unique if self.request_id is self.unique else f"{self.request_id}.{self.unique}"


class Head(Logged):
    """The head of a request to the HTTP front door, or of one that another region has sent."""

    __slots__ = (
        "authorization",
        "client",
        "gzip",
        "labels",
        "no_reuse",
        "path",
        "raw",
        "report",
        "traceparent",
        "ttft_slo_ms",
    )

    def __init__(self, path: str, arrived_s: float = 0.0, raw: RequestHead | None = None) -> None:
        super().__init__(arrived_s)
        self.path = path
        self.client = PUBLIC
        self.labels = Labels()
        self.authorization = ""
        self.traceparent = ""
        self.gzip = False
        """True if the body is compressed."""
        self.no_reuse = False
        self.report = False
        self.ttft_slo_ms = 0
        self.raw = raw
        """The head as it arrived."""


def sent_id(fields: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns the id that a client gave its request; empty if it gave none, or no sane one."""
    values = [value.decode("latin-1") for name, value in fields if name == b"x-request-id"]
    return next((value for value in reversed(values) if _REQUEST_ID.fullmatch(value)), "")


def read_head(head: Head, fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Reads header fields with names in lower case. Raises :class:`InvalidArgument`, naming the header, and
    :class:`HttpError`: 415."""
    for name, value in fields:
        read = _READERS.get(name)
        if read is not None:
            read(head, value.decode("latin-1"))


def _authorization(head: Head, value: str) -> None:
    head.authorization = value


def _request_id(head: Head, value: str) -> None:
    head.request_id = sane_id(value) or head.request_id


def traceparent(value: str) -> str:
    """Returns the W3C trace context as it came; empty if it is malformed."""
    return value if _TRACEPARENT.fullmatch(value) else ""


def _content_encoding(head: Head, value: str) -> None:
    coding = value.strip().lower()
    if coding in ("gzip", "x-gzip") and not head.gzip:
        head.gzip = True
    elif coding not in ("", "identity"):
        raise HttpError(
            415, f"The content-encoding {coding[:64]!r} is not supported: gzip is, once.", {b"accept-encoding": b"gzip"}
        )


def _traceparent(head: Head, value: str) -> None:
    head.traceparent = traceparent(value)


def _flag(name: str, value: str) -> bool:
    flag = _YES_NO.get(value.strip().lower().encode("latin-1"))
    if flag is None:
        raise InvalidArgument(f"{name} must be 1 or 0.", field=name)
    return flag


def _no_reuse(head: Head, value: str) -> None:
    head.no_reuse = _flag("x-pinyon-no-reuse", value)


def _no_store(head: Head, value: str) -> None:
    head.labels.no_store = _flag("x-pinyon-no-store", value)


def _report(head: Head, value: str) -> None:
    head.report = _flag("x-pinyon-report", value)


def _ttft_slo(head: Head, value: str) -> None:
    text = value.strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < SLO_MS_MAX:
        raise InvalidArgument(
            "x-pinyon-ttft-slo-ms must be a whole number of milliseconds, at least 1.", field="x-pinyon-ttft-slo-ms"
        )
    head.ttft_slo_ms = int(text)


def _label(value: str, name: str) -> str:
    """Returns a label decoded as UTF-8, or else as Latin-1, the traditional encoding of header fields."""
    with suppress(UnicodeDecodeError):
        value = value.encode("latin-1").decode("utf-8")
    return check_label(value.strip(), name)


def _kind(head: Head, value: str) -> None:
    text = value.strip()
    head.labels.kind = check_kind(text, "x-pinyon-type") if text else ""


def _session(head: Head, value: str) -> None:
    head.labels.session = _label(value, "x-pinyon-session") or head.labels.session


def _session_id(head: Head, value: str) -> None:
    """Takes the session id of other software, unless ours is given, in either order. Since it may be a credential, or
    not meant for us, only its hash is carried, and invalid ones are ignored."""
    with suppress(InvalidArgument):
        text = _label(value, "x-session-id")
        head.labels.session = head.labels.session or (text and xxh3_128_hexdigest(text.encode("utf-8")))


def _user(head: Head, value: str) -> None:
    head.labels.user = _label(value, "x-pinyon-user")


def _priority(head: Head, value: str) -> None:
    text = value.strip()
    if not _INTEGER.fullmatch(text):
        raise InvalidArgument("x-pinyon-priority must be a whole number.", field="x-pinyon-priority")
    head.labels.priority = check_priority(int(text), "x-pinyon-priority")


def _geographies(head: Head, value: str) -> None:
    names = tuple(name.strip() for name in value.split(",")) if value.strip() else ()
    head.labels.geographies = check_geographies(names, "x-pinyon-geographies")


_READERS = {
    b"authorization": _authorization,
    b"content-encoding": _content_encoding,
    b"x-request-id": _request_id,
    b"x-session-id": _session_id,
    b"traceparent": _traceparent,
    b"x-pinyon-geographies": _geographies,
    b"x-pinyon-no-reuse": _no_reuse,
    b"x-pinyon-no-store": _no_store,
    b"x-pinyon-priority": _priority,
    b"x-pinyon-report": _report,
    b"x-pinyon-session": _session,
    b"x-pinyon-ttft-slo-ms": _ttft_slo,
    b"x-pinyon-type": _kind,
    b"x-pinyon-user": _user,
}
