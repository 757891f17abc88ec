"""The failures of requests on their way, and of other people's servers. Messages are for clients; servers' addresses
appear in logs only."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from pinyon.core.errors import DeadlineExceeded, Internal, NotFound, PinyonError, Unavailable
from pinyon.http.answer import Reply
from pinyon.runtime.logging import get_logger

_RAISED = Exception("raised")
_log = get_logger("lb.http")


REGION_FIELD = "region"
"""The ``error.field`` of a region's answer when it has no room for a forwarded request."""
REJECTED_FIELD = "region_rejects"
"""The ``error.field`` when the region rejects this request: no instance would be in time, or its law forbids it."""


SHOWN_MAX = 8
"""The maximum number of names in an error message."""


class Absent(Unavailable):
    """The error when no connection could be made. ``silent``: it was not even refused in time."""

    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, silent: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.silent = silent


class Broke(Unavailable):
    """The error when a connection was lost, carried no HTTP, or brought nothing in time. ``begun``: a byte of the
    answer had come. ``silent``: a question got no answer at all. ``sends`` is how often the request was
    sent. ``before`` are bytes that the client should still get. ``its_fault``: it speaks against the server."""

    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, begun: bool, silent: bool = False, its_fault: bool = True) -> None:
        super().__init__(message)
        self.begun, self.its_fault = begun, its_fault
        self.silent = silent
        self.sends = 1
        self.before = b""


class ConnectionsFull(Unavailable):
    """The limit of connections is reached."""


class NoRoom(Unavailable):
    """The error when another region refused a request despite its report. ``lasting``: it never may take this one."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message, retry_after_s=1.0)
        self.lasting = lasting


class Refused(Unavailable):
    """The error when a server has no room. If no other server has any, its answer is what the client gets."""

    def __init__(self, message: str, status: int, body: bytes, kind: bytes, fields: bytes) -> None:
        super().__init__(message)
        self.status, self.body, self.kind, self.fields = status, body, kind, fields


def shown_names(names: Collection[str]) -> str:
    """Returns some of the names for an error message."""
    return f"{', '.join(list(names)[:SHOWN_MAX])}{', …' if len(names) > SHOWN_MAX else ''}"


def unknown_model(name: str, served: Collection[str] = ()) -> NotFound:
    """Returns the error for an unknown model; ``served`` are the names of the known ones."""
    message = f"The model '{name[:128]}' does not exist or you do not have access to it."
    return NotFound(f"{message} Served here: {shown_names(served)}." if served else message, field="model")


def late(limit_s: float, whose: str = ", the load balancer's --request-timeout-s") -> DeadlineExceeded:
    """Returns the error for a request that exceeded the time limit of ``whose``."""
    return DeadlineExceeded(f"The request took longer than {limit_s:g} s{whose}.")


def broken_by(error: Exception, reply: Reply, limit_s: float, log_id: str) -> PinyonError:
    """Returns the error that ends an answer which has begun. Raises it if the answer has not, since it has a status of
    its own then. ``limit_s`` is the limit that a :class:`TimeoutError` is about."""
    if isinstance(error, TimeoutError):
        error = late(limit_s)
    if not reply.begun:
        try:
            raise error
        finally:
            error = _RAISED  # the traceback's frame would keep the error and the body; ``del`` crashes compiled code
    if isinstance(error, PinyonError):
        return error
    _log.error("uncaught error in an answer", exc_info=error, extra={"request_id": log_id})
    return Internal("internal error")
