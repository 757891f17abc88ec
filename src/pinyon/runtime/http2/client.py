"""The client side: one connection for one stream, as :mod:`pinyon.runtime.duplex` needs it, or for many calls."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

from google.protobuf.message import DecodeError

from pinyon.core.address import parse_address
from pinyon.core.errors import Internal, PinyonError, Unavailable, error_from_code
from pinyon.messages.error import error_from_status
from pinyon.runtime.http2.connection import Http2Connection
from pinyon.runtime.http2.heads import is_answer, parse_trailers, request_head
from pinyon.runtime.http2.messages import MessageStream
from pinyon.runtime.http2.protocol import Http2Protocol
from pinyon.runtime.http2.stream import NOBODY, Field, Http2Stream, StreamFailed
from pinyon.runtime.http2.wire import ErrorCode

CONNECT_S = 2.0
"""Seconds to connect in all: name, TCP, TLS, and the peer's settings."""
FAREWELL_S = 0.2
"""Seconds for the end of TLS, in which the peer takes part."""

_log = logging.getLogger("pinyon.http2")


async def dial(
    protocol: Http2Protocol, settled: asyncio.Event, address: str, tls: ssl.SSLContext | None, name: str
) -> None:
    """Connects to ``address``, and waits for the event that the peer's settings are there.

    ``tls`` has ALPN set; ``name`` must be in the peer's certificate. Raises :class:`Unavailable`."""
    try:
        async with asyncio.timeout(CONNECT_S):
            host, port = parse_address(address)
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: protocol, host, port, ssl=tls, server_hostname=name if tls is not None else None
            )
            if tls is not None and not transport.get_extra_info("ssl_object").selected_alpn_protocol():
                raise Unavailable(f"{address} speaks TLS, and not HTTP/2 over it")
            await settled.wait()
    except TimeoutError:
        raise Unavailable(f"no connection to {address} within {CONNECT_S:g} s") from None
    except PinyonError:
        raise
    except (OSError, ssl.CertificateError) as error:
        raise Unavailable(f"no connection to {address}: {getattr(error, 'strerror', None) or error}") from None
    except Exception as error:  # for example, a name that cannot be looked up
        _log.info("no connection to %s", address, exc_info=error)
        raise Unavailable(f"no connection to {address}: {error}") from None


class ClientStream(MessageStream):
    """A call on a connection. ``read`` raises its end as a :class:`PinyonError`, and then returns :data:`EOF`."""

    _answered = False
    """True once the headers before the first message have come."""
    _status = ""
    """The status in the peer's trailers."""

    def begin(self, stream: Http2Stream) -> Http2Stream:
        """Takes the stream that this is the receiver of, and returns it."""
        self._stream = stream
        return stream

    def _fail(self, error: PinyonError) -> None:
        if self._error is None and not self._no_more:
            self._error = error
        self._wake()
        self.writable()

    # -- called by the stream

    def headed(self, fields: Sequence[Field], end: bool) -> None:
        if end:
            ended = parse_trailers(fields)
            self._status = ended.code
            if ended.code != "OK":
                self._fail(error_from_status(ended.code, ended.message, ended.metadata))
        elif not self._answered:
            self._answered = True
            if not is_answer(fields):
                ended = parse_trailers(fields)
                self._fail(error_from_status(ended.code, ended.message, ()))
                cast("Http2Stream", self._stream).reset(ErrorCode.CANCEL)

    def half_closed(self) -> None:
        if not self._status:
            self._fail(Internal("the peer ended the call without a status"))
        super().half_closed()

    def failed(self, error: StreamFailed) -> None:
        self._fail(error_from_code(error.status or "INTERNAL", error.reason))
        super().failed(error)

    def _next(self) -> Any:
        try:
            return super()._next()
        except DecodeError:
            raise Internal("the peer's message cannot be parsed") from None


class Http2Call(ClientStream):
    """A call to ``address`` (``host:port``), which connects at once."""

    def __init__(
        self,
        address: str,
        path: str,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], Any],
        tls: ssl.SSLContext | None = None,
        name: str = "",
    ) -> None:
        """Begins to connect. ``tls`` has ALPN set; ``name`` must be in the peer's certificate."""
        self._connected: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._settings = asyncio.Event()
        self._gone = asyncio.Event()
        protocol = Http2Protocol(Http2Connection, self._heard, self._lost)
        super().__init__(protocol, decode, encode)
        authority, scheme = (address, "http") if tls is None else (name, "https")
        self._head = request_head(path, authority, scheme)
        self._connecting = self._loop.create_task(self._connect(address, tls, name), name=f"connect {address}")

    async def _connect(self, address: str, tls: ssl.SSLContext | None, name: str) -> None:
        try:
            await dial(self._protocol, self._settings, address, tls, name)
            self._stream = self._protocol.connection.open(self._head, self)
        except StreamFailed as error:
            self.failed(error)
        except PinyonError as error:
            self._fail(error)
        finally:
            if not self._connected.done():
                self._connected.set_result(self._stream is not None)

    def _heard(self) -> None:
        if self._protocol.connection.ready:
            self._settings.set()

    def _lost(self) -> None:
        self._gone.set()
        self._settings.set()  # the task that waits for settings then finds that the call is over
        self._fail(Unavailable("the peer is gone"))

    # -- as in a call of grpcio

    async def wait_for_connection(self) -> None:
        """Waits for the connection. Raises :class:`asyncio.InvalidStateError` if there is none."""
        if not await asyncio.shield(self._connected) or self._error is not None:
            raise asyncio.InvalidStateError("not connected")

    async def done_writing(self) -> None:
        await self._room()
        if self._stream is not None:
            self._stream.end()

    def cancel(self) -> None:
        """Ends the call: tells the peer, and reads nothing more."""
        self._connecting.cancel()
        if self._stream is not None:
            self._stream.reset(ErrorCode.CANCEL)
        self._fail(error_from_code("CANCELLED", "cancelled here"))

    async def close(self) -> None:
        """Ends the connection."""
        self._connecting.cancel()
        try:
            await asyncio.wait({self._connecting})
            await self._disconnect()
        finally:
            self._let_go()

    async def _disconnect(self) -> None:
        protocol = self._protocol
        if not protocol.made or self._gone.is_set():
            return
        if protocol.transport.get_write_buffer_size():  # a peer that has not read all data will not read the end either
            protocol.abort("closed")
        else:
            protocol.close()
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._gone.wait()
        except TimeoutError:
            protocol.abort("closed")

    def _let_go(self) -> None:
        """Breaks reference cycles, so that the call need not wait for a garbage collection."""
        self._protocol.heard_by_nobody()
        if self._stream is not None:
            self._stream.receiver = NOBODY
            self._stream = None
