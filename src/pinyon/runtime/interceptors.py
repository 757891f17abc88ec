"""Errors on the wire: what a servicer raises becomes the right status, and back again on the client's side.

Without this, an uncaught exception leaves as ``UNKNOWN`` with its text, which may hold what the caller must not see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError

from pinyon.core.errors import Internal, InvalidArgument, PinyonError
from pinyon.messages.error import ERROR_METADATA_KEY, error_from_status, error_to_proto
from pinyon.runtime.logging import get_logger

ERROR_TEXT = 2000
"""Letters of an error's message on the wire; peers take 8 KiB of headers."""

_log = get_logger("rpc")


def error_from_rpc(error: grpc.aio.AioRpcError) -> PinyonError:
    """The error a peer raised; a transport failure becomes :class:`Unavailable` and so on by its status."""
    metadata: Iterable[tuple[str, str | bytes]] = cast("Any", error.trailing_metadata()) or ()
    return error_from_status(error.code().name, error.details() or "", metadata)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PinyonError) -> NoReturn:
    detail = (f"{error.field}: {error.message}" if error.field else error.message)[:ERROR_TEXT]
    known = error_to_proto(error)
    known.message = known.message[:ERROR_TEXT]
    metadata = ((ERROR_METADATA_KEY, known.SerializeToString()),)
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), detail, metadata)
    raise AssertionError("abort always raises")


def _known(method: str, error: BaseException) -> PinyonError:
    if isinstance(error, PinyonError):
        return error
    _log.error("uncaught error in %s", method, exc_info=error)
    return Internal("internal error")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Translates what any of the four kinds of methods raises."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None
        method = handler_call_details.method
        inner, make = behaviour_of(handler)
        guard = _guard_stream if handler.response_streaming else _guard_unary
        parse = _parsing(handler.request_deserializer)
        # The one request of a call is parsed under the guard: what fails before that leaves as UNKNOWN.
        late = not handler.request_streaming
        return make(
            guard(method, _parsed(inner, parse) if late else inner),
            request_deserializer=None if late else parse,
            response_serializer=handler.response_serializer,
        )


def _parsing(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def parse(raw: bytes) -> Any:
        if deserializer is None:
            return raw
        try:
            return deserializer(raw)
        except DecodeError:
            raise InvalidArgument("the message cannot be parsed") from None

    return parse


def _parsed(behaviour: Any, parse: Callable[[bytes], Any]) -> Any:
    return lambda raw, context: behaviour(parse(raw), context)


def behaviour_of(handler: Any) -> tuple[Any, Any]:
    """What a handler does, and the maker of handlers of its kind."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    return getattr(handler, kind), getattr(grpc, f"{kind}_rpc_method_handler")


def _guard_unary(method: str, behaviour: Any) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(context, _known(method, error))

    return call


def _guard_stream(method: str, behaviour: Any) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            result = behaviour(request, context)
            if hasattr(result, "__aiter__"):
                async for message in result:
                    yield message
            else:  # a handler that writes by itself
                # Else it goes with the first write, and if that is cancelled on its way, no status can follow it.
                try:
                    await context.send_initial_metadata(())
                except BaseException:
                    result.close()  # it has not begun, and nobody will await it
                    raise
                await result
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(context, _known(method, error))

    return call
