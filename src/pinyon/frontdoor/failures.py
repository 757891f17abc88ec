"""What goes wrong with a request on its way, and with other people's servers. Messages are for clients: servers'
addresses are in logs only."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from pinyon.core.errors import DeadlineExceeded, Internal, NotFound, PinyonError, Unavailable
from pinyon.http.answer import Reply
from pinyon.runtime.logging import get_logger

_log = get_logger("lb.http")


REGION_FIELD = "region"
"""``error.field`` where a region has no room for what was forwarded to it."""
REJECTED_FIELD = "region_rejects"
"""The same where it will not have this one: none of its instances would be in time, or its law says no."""


SHOWN_MAX = 8
"""Names in an error."""


class Absent(Unavailable):
    """No connection could be made. ``silent``: nor was it refused in time."""

    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, silent: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.silent = silent


class Broke(Unavailable):
    """The connection was lost, or what came over it is no HTTP, or nothing came in time. ``begun``: a byte of the
    answer had come. ``silent``: of a question, nothing came. ``sends`` is how often the request was sent."""

    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, begun: bool, silent: bool = False) -> None:
        super().__init__(message)
        self.begun = begun
        self.silent = silent
        self.sends = 1


class ConnectionsFull(Unavailable):
    """There are as many connections as may be."""


class NoRoom(Unavailable):
    """Another region did not take it, whatever it had said. ``lasting``: and will not, as it may not serve it."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message, retry_after_s=1.0)
        self.lasting = lasting


class Refused(Unavailable):
    """A server has no room. If nobody else has any, its own answer is what the client gets."""

    def __init__(self, message: str, status: int, body: bytes, kind: bytes, fields: bytes) -> None:
        super().__init__(message)
        self.status, self.body, self.kind, self.fields = status, body, kind, fields


def shown_names(names: Collection[str]) -> str:
    """Some of them, in an error."""
    return f"{', '.join(list(names)[:SHOWN_MAX])}{', …' if len(names) > SHOWN_MAX else ''}"


def unknown_model(name: str, served: Collection[str] = ()) -> NotFound:
    """``served``: the names of those that there are."""
    message = f"The model '{name[:128]}' does not exist or you do not have access to it."
    return NotFound(f"{message} Served here: {shown_names(served)}." if served else message, field="model")


def late(limit_s: float, whose: str = ", the load balancer's --request-timeout-s") -> DeadlineExceeded:
    """A request took longer than it may, by the limit of ``whose``."""
    return DeadlineExceeded(f"The request took longer than {limit_s:g} s{whose}.")


def broken_by(error: Exception, reply: Reply, limit_s: float, log_id: str) -> PinyonError:
    """Returns what an answer that has begun ends with. While it has not, that is raised: it has a status of its own.
    ``limit_s`` is what a :class:`TimeoutError` is of."""
    if isinstance(error, TimeoutError):
        error = late(limit_s)
    if not reply.begun:
        raise error
    if isinstance(error, PinyonError):
        return error
    _log.error("uncaught error in an answer", exc_info=error, extra={"request_id": log_id})
    return Internal("internal error")
