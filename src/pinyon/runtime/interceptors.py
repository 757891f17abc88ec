"""Errors on the wire: an error of a servicer becomes the right status, and an error again on the client's side.

Without this, an uncaught exception leaves as ``UNKNOWN`` with its text, which may hold secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NoReturn, cast

import grpc

from pinyon.core.errors import Internal, PinyonError
from pinyon.messages.error import ERROR_METADATA_KEY, error_from_status, error_to_proto
from pinyon.runtime.logging import get_logger

ERROR_TEXT = 2000
"""The largest number of characters of an error's message on the wire; peers take 8 KiB of headers."""

_log = get_logger("rpc")


def error_from_rpc(error: grpc.aio.AioRpcError) -> PinyonError:
    """Returns the error a peer raised; a transport failure becomes :class:`Unavailable` and so on by its status."""
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


Interceptor = Callable[[Any, str], Any]
"""A function that returns a handler in place of this one, which it wraps; it takes the method's full name as well.

:class:`pinyon.runtime.first_message.FirstMessages` is the innermost. All others get handlers that read their messages
themselves, so there are only two kinds: with one answer, and with a stream.
"""


def behaviour_of(handler: Any) -> Any:
    """Returns the behaviour of a handler that reads its messages itself."""
    return handler.stream_stream if handler.response_streaming else handler.stream_unary


def doing(handler: Any, behaviour: Any, parse: Callable[[bytes], Any] | None = None) -> Any:
    """Returns a handler with another ``behaviour``, which reads its messages itself, parsed by ``parse`` if given."""
    many = handler.response_streaming
    make: Any = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler
    return make(
        behaviour,
        request_deserializer=parse or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def within(handler: Any, guard: Callable[[Any], AbstractAsyncContextManager[None]]) -> Any:
    """Returns a handler that runs within the context manager that ``guard`` makes of a call's context."""
    behaviour = behaviour_of(handler)

    async def one(requests: Any, context: Any) -> Any:
        async with guard(context):
            return await behaviour(requests, context)

    async def many(requests: Any, context: Any) -> AsyncIterator[Any]:
        async with guard(context):
            result = behaviour(requests, context)
            if hasattr(result, "__aiter__"):
                async for message in result:
                    yield message
                return
            # The method writes its answers itself. Initial metadata would go with the first write; if that is cancelled
            # on its way, no status can follow.
            try:
                await context.send_initial_metadata(())
            except BaseException:
                result.close()  # the coroutine has not begun, and nobody will await it
                raise
            await result

    return doing(handler, many if handler.response_streaming else one)


def with_statuses(handler: Any, method: str) -> Any:
    """Returns a handler whose errors become statuses."""
    return within(handler, lambda context: _told(method, context))


@asynccontextmanager
async def _told(method: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        await _abort(context, _known(method, error))
