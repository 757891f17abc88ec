"""One log line for each request that has ended, of either front door: what was asked, by whom, and how it went.

Never in it: keys, prompts, answers, headers as they came. A line's ids are ours, or the client's after a check.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import grpc

from pinyon.core.clock import Clock
from pinyon.frontdoor.head import log_id, sane_id, unique_id
from pinyon.runtime.interceptors import Interceptor, within
from pinyon.runtime.logging import get_logger, log_line

_log = get_logger("lb.access")

Facts = Callable[[], Mapping[str, Any]]
"""Returns what only those know who serve it; asked for a line that is written."""
_QUIET_SERVICES = ("/grpc.health.", "/grpc.reflection.")


class Answered(NamedTuple):
    """A request that has ended. ``holder`` is its tenant, ``broken`` the error of an answer that had begun."""

    method: str
    route: str
    status: int | str
    arrived_s: float
    request_id: str
    holder: str
    broken: str = ""
    facts: Facts | None = None


class GrpcCall:
    """What the log is to know of a call. The servicer adds what only it knows."""

    __slots__ = ("facts", "holder", "request_id", "unique")

    def __init__(self, client_id: str = "") -> None:
        self.unique = unique_id()
        self.request_id = sane_id(client_id) or self.unique
        """What the client is told."""
        self.holder = ""
        self.facts: Facts | None = None

    @property
    def log_id(self) -> str:
        return log_id(self.request_id, self.unique)


_call: ContextVar[GrpcCall] = ContextVar("pinyon_lb_call")


def grpc_call() -> GrpcCall:
    """That of the present task; outside of a server one of its own."""
    return _call.get(None) or GrpcCall()


class AccessLog(Interceptor):
    """``answered`` is told of HTTP requests; as an interceptor, the outermost, it sees gRPC calls."""

    def __init__(self, enabled: bool, clock: Clock) -> None:
        self._enabled = enabled
        self._clock = clock

    def wants(self, *, quiet: bool) -> bool:
        """Whether a line is written of such a request."""
        return self._enabled and _log.isEnabledFor(logging.DEBUG if quiet else logging.INFO)

    def answered(self, seen: Answered, *, quiet: bool = False) -> None:
        """``quiet`` ones are logged at debug only."""
        level = logging.DEBUG if quiet else logging.INFO
        if self._enabled and _log.isEnabledFor(level):
            self._line(level, seen)

    def _line(self, level: int, seen: Answered) -> None:
        facts: dict[str, Any] = {"method": seen.method, "route": seen.route, "status": seen.status}
        if seen.request_id:
            facts["request_id"] = seen.request_id
        if seen.holder:
            facts["tenant"] = seen.holder
        facts["ms"] = int((self._clock() - seen.arrived_s) * 1e4) / 10
        if seen.broken:
            facts["broken"] = seen.broken
        if seen.facts is not None:
            facts.update(seen.facts())
        log_line(_log, level, "access", facts)

    # -- gRPC

    def remade(self, handler: Any, method: str) -> Any:
        level = logging.DEBUG if method.startswith(_QUIET_SERVICES) else logging.INFO
        return within(handler, lambda context: self._logged(method, level, context))

    @asynccontextmanager
    async def _logged(self, method: str, level: int, context: Any) -> AsyncIterator[None]:
        seen, began_s, ended = GrpcCall(_client_id(context)), self._clock(), "CANCELLED"
        _call.set(seen)
        try:
            yield
            ended = "OK"
        except Exception as error:
            ended = _status(error, context)
            raise
        finally:
            if self._enabled and _log.isEnabledFor(level):
                self._line(level, Answered("gRPC", method, ended, began_s, seen.log_id, seen.holder, facts=seen.facts))


def _client_id(context: Any) -> str:
    """As it came; see :func:`sane_id`."""
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str):
            return value
    return ""


def _status(error: Exception, context: Any) -> str:
    if isinstance(error, grpc.aio.AbortError):
        code = context.code()
        return code.name if isinstance(code, grpc.StatusCode) else str(code)
    return "UNKNOWN"
