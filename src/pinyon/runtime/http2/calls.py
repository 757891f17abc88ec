"""Unary calls, many at a time on one connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pinyon.core.errors import DeadlineExceeded, Internal, Unavailable, error_from_code
from pinyon.runtime.http2.client import ClientStream, dial
from pinyon.runtime.http2.connection import STREAMS_MAX, Http2Connection
from pinyon.runtime.http2.heads import request_head, timeout_field
from pinyon.runtime.http2.messages import EOF
from pinyon.runtime.http2.protocol import Http2Protocol, together
from pinyon.runtime.http2.stream import NOBODY, Field, StreamFailed
from pinyon.runtime.http2.wire import ErrorCode


class Http2Calls:
    """The calls to ``address``. The first one connects, and so does one after the connection is lost."""

    def __init__(self, address: str, tls: Callable[[], ssl.SSLContext] | None = None, name: str = "") -> None:
        """Takes the function that returns the context of a new connection, and a name of the peer's certificate."""
        self._address, self._tls, self._name = address, tls, name
        self._room = asyncio.Semaphore(STREAMS_MAX)
        self._heads: dict[str, list[Field]] = {}
        self._protocol: Http2Protocol | None = None
        self._dialing: asyncio.Task[Http2Protocol] | None = None
        self.under_way = 0
        """The number of calls that have not ended."""

    async def call(
        self, path: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], request: Any, timeout_s: float
    ) -> Any:
        """Returns the answer; ``path`` is ``/package.Service/Method``. Raises the peer's error.

        Raises Unavailable if no peer is there, and DeadlineExceeded if it does not answer in time."""
        self.under_way += 1
        try:
            async with asyncio.timeout(timeout_s), self._room:
                protocol = self._protocol
                if protocol is None or protocol.connection.leaving:
                    protocol = await self._connected()
                head = self._heads.get(path)
                if head is None:
                    authority, scheme = (self._address, "http") if self._tls is None else (self._name, "https")
                    head = self._heads[path] = request_head(path, authority, scheme)
                fields = [*head, timeout_field(timeout_s)]
                return await _ask(ClientStream(protocol, decode, encode), protocol, fields, request)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer of {self._address} within {timeout_s:g} s") from None
        finally:
            self.under_way -= 1

    async def _connected(self) -> Http2Protocol:
        """Returns a connection; those who ask at the same time get the same one. Raises :class:`Unavailable`."""
        if self._dialing is None or self._dialing.done():
            self._dialing = asyncio.create_task(self._dial(), name=f"connect {self._address}")
            self._dialing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._dialing)

    async def _dial(self) -> Http2Protocol:
        settled = asyncio.Event()
        protocol = Http2Protocol(
            Http2Connection, lambda: settled.set() if protocol.connection.ready else None, settled.set
        )
        try:
            await dial(protocol, settled, self._address, None if self._tls is None else self._tls(), self._name)
            if protocol.connection.leaving:
                raise Unavailable("the peer is gone")
        except BaseException:
            if protocol.made:
                protocol.abort("closed")
            raise
        finally:
            protocol.heard_by_nobody()
        self._protocol = protocol
        return protocol

    def close(self) -> None:
        """Ends the connection; calls that still run end as unavailable."""
        if self._dialing is not None:
            self._dialing.cancel()
        if self._protocol is not None:
            self._protocol.close()


async def _ask(call: ClientStream, protocol: Http2Protocol, fields: list[Field], request: Any) -> Any:
    """Makes the call on a stream of its own, which is over when this returns or raises."""
    stream = None
    try:
        with together(protocol.connection):
            stream = call.begin(protocol.connection.open(fields, call))
            sent = call.push(request)
            if sent:
                stream.end()
        if not sent:
            with suppress(asyncio.InvalidStateError):  # the call is over, and its end says why
                await call.write(request)
                stream.end()
        answer = await call.read()
        if answer is EOF or await call.read() is not EOF:
            raise Internal("the peer did not give one answer")
        return answer
    except StreamFailed as error:
        raise error_from_code(error.status, error.reason) from None
    finally:
        if stream is not None:
            stream.receiver = NOBODY  # no reference cycle is left
            stream.reset(ErrorCode.CANCEL)
