"""The head of a request: what the load balancer reads from it, and the class and owner that this gives the request."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from xxhash import xxh3_128_hexdigest

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import TURN_MAX, RequestClass, check_geographies, check_kind, check_label, check_priority
from pinyon.frontdoor.auth import PUBLIC, Client
from pinyon.http.answer import HttpError
from pinyon.http.request import RequestHead
from pinyon.openai.parse import Call, PromptInput

SLO_MS_MAX = 1 << 31

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)
_YES_NO = {"": False, "0": False, "false": False, "1": True, "true": True}

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


@dataclass(slots=True)
class Labels:
    """The labels that a client gives beside its call, by headers or in a message; empty, 0 or None if it gives none."""

    kind: str = ""
    turn: int = 0
    session: str = ""
    user: str = ""
    priority: int | None = None
    geographies: tuple[str, ...] = ()
    cache_salt: str = ""
    no_store: bool = False


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
        "authorization", "client", "gzip", "labels", "no_reuse", "path", "raw", "report", "traceparent", "ttft_slo_ms",
    )  # fmt: skip

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
        if name.startswith(b"x-pinyon-"):
            _read_own(head, name.decode("latin-1"), value.decode("latin-1"))
        elif name == b"authorization":
            head.authorization = value.decode("latin-1")
        elif name == b"content-encoding":
            _read_encoding(head, value.decode("latin-1"))
        elif name == b"x-request-id":
            head.request_id = sane_id(value.decode("latin-1")) or head.request_id
        elif name == b"x-session-id":
            _read_session_id(head, value.decode("latin-1"))
        elif name == b"traceparent":
            head.traceparent = traceparent(value.decode("latin-1"))


def traceparent(value: str) -> str:
    """Returns the W3C trace context as it came; empty if it is malformed."""
    return value if _TRACEPARENT.fullmatch(value) else ""


def _read_encoding(head: Head, value: str) -> None:
    coding = value.strip().lower()
    if coding in ("gzip", "x-gzip") and not head.gzip:
        head.gzip = True
    elif coding not in ("", "identity"):
        raise HttpError(
            415, f"The content-encoding {coding[:64]!r} is not supported: gzip is, once.", {b"accept-encoding": b"gzip"}
        )


def _read_session_id(head: Head, value: str) -> None:
    """Takes the session id of other software, unless ours is given, in either order. Since it may be a credential, or
    not meant for us, only its hash is carried, and invalid ones are ignored."""
    with suppress(InvalidArgument):
        text = _label(value, "x-session-id")
        head.labels.session = head.labels.session or (text and xxh3_128_hexdigest(text.encode("utf-8")))


def _read_own(head: Head, name: str, value: str) -> None:
    """Reads a header field of our own; unknown ones are ignored."""
    labels, text = head.labels, value.strip()
    match name:
        case "x-pinyon-geographies":
            labels.geographies = check_geographies(tuple(map(str.strip, value.split(","))) if text else (), name)
        case "x-pinyon-no-reuse":
            head.no_reuse = _flag(name, text)
        case "x-pinyon-no-store":
            labels.no_store = _flag(name, text)
        case "x-pinyon-priority":
            if not _INTEGER.fullmatch(text):
                raise InvalidArgument(f"{name} must be a whole number.", field=name)
            labels.priority = check_priority(int(text), name)
        case "x-pinyon-report":
            head.report = _flag(name, text)
        case "x-pinyon-session":
            labels.session = _label(value, name) or labels.session
        case "x-pinyon-ttft-slo-ms":
            if not text.isascii() or not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < SLO_MS_MAX:
                raise InvalidArgument(f"{name} must be a whole number of milliseconds, at least 1.", field=name)
            head.ttft_slo_ms = int(text)
        case "x-pinyon-type":
            labels.kind = check_kind(text, name) if text else ""
        case "x-pinyon-user":
            labels.user = _label(value, name)


def _flag(name: str, text: str) -> bool:
    flag = _YES_NO.get(text.lower())
    if flag is None:
        raise InvalidArgument(f"{name} must be 1 or 0.", field=name)
    return flag


def _label(value: str, name: str) -> str:
    """Returns a label decoded as UTF-8, or else as Latin-1, the traditional encoding of header fields."""
    with suppress(UnicodeDecodeError):
        value = value.encode("latin-1").decode("utf-8")
    return check_label(value.strip(), name)


def classify(
    labels: Labels, call: Call, client: Client, arrived_unix_s: float, geographies_field: str = "geographies"
) -> RequestClass:
    """Returns the request's class; labels override the call's fields, which override the key's.

    The tenant is the key's alone. If the key names geographies, the client may only choose among them. Raises
    :class:`InvalidArgument`."""
    geographies = allowed_geographies(labels, client, geographies_field)
    priority = labels.priority if labels.priority is not None else call.priority
    conversation = call.prompt_field == "messages"
    return RequestClass(
        kind=labels.kind or client.kind or ("chat" if conversation else "completion"),
        turn=labels.turn or _turn(call.prompt),
        session=labels.session,
        user=labels.user or call.user,
        priority=client.priority if priority is None else priority,
        arrived_unix_s=arrived_unix_s,
        tenant=client.tenant,
        geographies=geographies,
        cache_salt=labels.cache_salt or call.cache_salt,
        no_store=labels.no_store,
    )


def allowed_geographies(labels: Labels, client: Client, field: str = "x-pinyon-geographies") -> tuple[str, ...]:
    """Returns where the request may be served; empty for no restriction. Raises :class:`InvalidArgument`."""
    allowed = client.geographies
    outside = [name for name in labels.geographies if allowed and name not in allowed]
    if outside:
        raise InvalidArgument(f"This API key allows {', '.join(allowed)}, not {', '.join(outside)}.", field=field)
    return labels.geographies or allowed


def _turn(prompt: PromptInput) -> int:
    """Returns how many messages are the user's; 1 for a prompt that is no conversation."""
    spoken = sum(message.get("role") == "user" for message in prompt) if isinstance(prompt, list) else 0
    return min(TURN_MAX, max(1, spoken))
