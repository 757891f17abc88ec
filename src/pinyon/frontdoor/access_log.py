"""One log line for each request that has ended, of either front door: what was asked, by whom, and how it went.

Never in it: keys, prompts, answers, headers as they came. A line's ids are ours, or the client's after a check.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import grpc

from pinyon.core.clock import Clock
from pinyon.frontdoor.head import log_id, sane_id, unique_id
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


class AccessLog(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
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

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        level = logging.DEBUG if method.startswith(_QUIET_SERVICES) else logging.INFO
        if handler.response_streaming:
            many = handler.request_streaming
            make: Any = grpc.stream_stream_rpc_method_handler if many else grpc.unary_stream_rpc_method_handler
            inner = self._stream(handler.stream_stream if many else handler.unary_stream, method, level)
        else:
            many = handler.request_streaming
            make = grpc.stream_unary_rpc_method_handler if many else grpc.unary_unary_rpc_method_handler
            inner = self._unary(handler.stream_unary if many else handler.unary_unary, method, level)
        return make(
            inner,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, behaviour: Any, method: str, level: int) -> Any:
        async def call(request: Any, context: Any) -> Any:
            seen, began_s, ended = self._begin(context), self._clock(), "CANCELLED"
            try:
                answer = await behaviour(request, context)
                ended = "OK"
                return answer
            except Exception as error:
                ended = _status(error, context)
                raise
            finally:
                self._end(method, level, ended, began_s, seen)

        return call

    def _stream(self, behaviour: Any, method: str, level: int) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            seen, began_s, ended = self._begin(context), self._clock(), "CANCELLED"
            try:
                async for message in behaviour(request, context):
                    yield message
                ended = "OK"
            except Exception as error:
                ended = _status(error, context)
                raise
            finally:
                self._end(method, level, ended, began_s, seen)

        return call

    def _begin(self, context: Any) -> GrpcCall:
        seen = GrpcCall(_client_id(context))
        _call.set(seen)
        return seen

    def _end(self, method: str, level: int, status: str, began_s: float, seen: GrpcCall) -> None:
        if self._enabled and _log.isEnabledFor(level):
            self._line(level, Answered("gRPC", method, status, began_s, seen.log_id, seen.holder, facts=seen.facts))


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
