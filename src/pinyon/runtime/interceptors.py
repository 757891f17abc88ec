"""Errors on the wire: an error of a servicer becomes the right status, and an error again on the client's side.

Without this, an uncaught exception leaves as ``UNKNOWN`` with its text, which may hold secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

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


Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""A method as a server calls it, with the iterator of its messages and its context.

It reads its messages itself. It returns its one answer; a method with a stream of answers writes them itself."""

Interceptor = Callable[[Behaviour, str], Behaviour]
"""A function that returns a behaviour in place of this one, which it wraps; it takes the method's full name as well."""


def with_statuses(behaviour: Behaviour, method: str) -> Behaviour:
    """Returns a behaviour whose errors become statuses."""

    async def call(requests: Any, context: Any) -> Any:
        try:
            return await behaviour(requests, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            if not isinstance(error, PinyonError):
                _log.error("uncaught error in %s", method, exc_info=error)
            known = error_to_proto(error if isinstance(error, PinyonError) else Internal("internal error"))
            known.message = known.message[:ERROR_TEXT]
            detail = (f"{known.field}: {known.message}" if known.field else known.message)[:ERROR_TEXT]
            metadata = ((ERROR_METADATA_KEY, known.SerializeToString()),)
            return await context.abort(grpc.StatusCode[known.code], detail, metadata)

    return call
