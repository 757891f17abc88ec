"""Errors on the wire: an error of a servicer becomes the right status, and an error again on the client's side.

Without this, an uncaught exception leaves as ``UNKNOWN`` with its text, which may hold secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
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


Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""A method as a server calls it, with the iterator of its messages and its context.

It reads its messages itself. It returns its one answer; a method with a stream of answers writes them itself."""

Interceptor = Callable[[Behaviour, str], Behaviour]
"""A function that returns a behaviour in place of this one, which it wraps; it takes the method's full name as well."""


def within(behaviour: Behaviour, guard: Callable[[Any], AbstractAsyncContextManager[None]]) -> Behaviour:
    """Returns a behaviour that runs within the context manager that ``guard`` makes of a call's context."""

    async def call(requests: Any, context: Any) -> Any:
        async with guard(context):
            return await behaviour(requests, context)

    return call


def with_statuses(behaviour: Behaviour, method: str) -> Behaviour:
    """Returns a behaviour whose errors become statuses."""
    return within(behaviour, lambda context: _told(method, context))


@asynccontextmanager
async def _told(method: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        await _abort(context, _known(method, error))
