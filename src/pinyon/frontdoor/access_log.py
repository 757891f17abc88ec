"""The access log: one line for each ended request of both front doors, with what was asked, by whom, and the result.

It never contains keys, prompts, answers, or headers as they came. Its ids are ours, or the client's after a check."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import grpc

from pinyon.core.clock import Clock
from pinyon.frontdoor.head import Logged, sane_id
from pinyon.runtime.interceptors import Behaviour
from pinyon.runtime.logging import get_logger, log_line

_log = get_logger("lb.access")

_QUIET_SERVICES = ("/grpc.health.", "/grpc.reflection.")
_call: ContextVar[Logged] = ContextVar("pinyon_lb_call")


def grpc_call() -> Logged:
    """Returns the log facts of the present task's call, or new ones outside of a server. The servicer adds to them."""
    return _call.get(None) or Logged()


class AccessLog:
    """The access log. HTTP requests are reported to ``answered``; gRPC calls pass it as the outermost interceptor."""

    def __init__(self, enabled: bool, clock: Clock) -> None:
        self._enabled = enabled
        self._clock = clock

    def answered(self, method: str, route: str, status: int | str, seen: Logged, *, quiet: bool = False) -> None:
        """Logs an ended request, a ``quiet`` one at debug level only."""
        level = logging.DEBUG if quiet else logging.INFO
        known, seen.facts = seen.facts, None  # a method of what holds ``seen`` would make a cycle
        if not self._enabled or not _log.isEnabledFor(level):
            return
        facts: dict[str, Any] = {"method": method, "route": route, "status": status, "request_id": seen.log_id}
        if seen.holder:
            facts["tenant"] = seen.holder
        facts["ms"] = int((self._clock() - seen.arrived_s) * 1e4) / 10
        if seen.broken:
            facts["broken"] = seen.broken
        if known is not None:
            facts.update(known())
        log_line(_log, level, "access", facts)

    # -- gRPC

    def around(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def call(requests: Any, context: Any) -> Any:
            seen, ended = Logged(self._clock(), sane_id(metadata(context, "x-request-id"))), "CANCELLED"
            _call.set(seen)
            try:
                answer = await behaviour(requests, context)
                ended = "OK"
                return answer
            except grpc.aio.AbortError:
                code = context.code()
                ended = code.name if isinstance(code, grpc.StatusCode) else str(code)
                raise
            except Exception:
                ended = "UNKNOWN"
                raise
            finally:
                self.answered("gRPC", method, ended, seen, quiet=method.startswith(_QUIET_SERVICES))

        return call


def metadata(context: Any, name: str) -> str:
    """Returns a call's metadata of that name as it came; empty if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return ""
