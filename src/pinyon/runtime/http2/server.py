"""The server side: a server in place of grpcio's, whose handlers read their messages themselves."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import grpc

from pinyon.runtime.http2.connection import Http2Connection
from pinyon.runtime.http2.heads import ANSWER, Http2RequestHead, Metadata, parse_request, trailers
from pinyon.runtime.http2.listener import Listener
from pinyon.runtime.http2.messages import EOF, MessageStream
from pinyon.runtime.http2.protocol import Http2Protocol, together
from pinyon.runtime.http2.stream import Field, Http2Stream, StreamFailed
from pinyon.runtime.http2.wire import ErrorCode

IDLE_S = 10.0
"""Seconds after which a connection without any call is ended."""
IDLE_DEAD_TICKS = 40
"""The ticks, 10 s in all, for which a peer without calls may be silent; no call waits for such a peer."""
FAREWELL_S = 1.0
"""Seconds that cancelled calls may take to end."""
LINGER_S = 5.0
"""Seconds that a peer may take to read the data before the end of a call."""

_log = logging.getLogger("pinyon.http2")


class SessionContext(MessageStream):
    """The part of grpcio's servicer context that a handler may use."""

    def __init__(self, protocol: ServerProtocol, stream: Http2Stream, head: Http2RequestHead) -> None:
        super().__init__(protocol, bytes, bytes)
        self._server_side = protocol
        self._stream = stream
        self._head = head
        self._began_s = self._loop.time()
        self._answered = False
        self._ended: tuple[str, str, Metadata] | None = None
        self.task: asyncio.Task[None] | None = None
        self.broken = False
        """True if the call was not served to its end."""
        self.served = False
        """True once the handler has ended the call well or has read a message.

        A peer is not credited for a call of an unknown method, nor for one refused before its message was read."""

    def peer(self) -> str:
        """Returns ``ipv4:host:port`` or ``ipv6:[host]:port``, as grpcio does."""
        return self._server_side.peer

    def peer_identities(self) -> Sequence[bytes] | None:
        """Returns the DNS names of the caller's certificate; None without one."""
        return self._server_side.identities

    def time_remaining(self) -> float | None:
        """Returns the seconds to the caller's deadline; None if it has none."""
        limit_s = self._head.timeout_s
        return None if limit_s is None else max(0.0, limit_s - (self._loop.time() - self._began_s))

    def invocation_metadata(self) -> Metadata:
        return self._head.metadata

    @property
    def connection(self) -> Http2Connection:
        return self._protocol.connection

    def method(self) -> str:
        return self._head.path

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Sends the initial headers, without metadata, as no method here has any."""
        if not self._answered:
            self._begin()

    async def read(self) -> Any:
        message = await super().read()
        self.served = self.served or message is not EOF
        return message

    def _begin(self) -> None:
        self._answered = True
        stream = cast("Http2Stream", self._stream)
        if not stream.closed:
            connection = self._protocol.connection
            connection.write(connection.headers(stream.stream_id, ANSWER, end=False))

    def push(self, message: Any) -> bool:
        if not self._answered:
            self._begin()
        return super().push(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """Ends the call with this status: raises an error that the handler must let pass."""
        self._ended = (code.name, details, trailing_metadata)
        raise grpc.aio.AbortError("aborted by the handler")

    def codecs(self, decode: Callable[[bytes], Any] | None, encode: Callable[[Any], bytes] | None) -> None:
        """Sets the codecs of the called method."""
        self._decode, self._encode = decode or bytes, encode or bytes

    def finish(self, code: str = "OK", message: str = "", metadata: Metadata = ()) -> None:
        """Sends the status as trailers, after all that was written."""
        stream = cast("Http2Stream", self._stream)
        code, message, metadata = self._ended or (code, message, metadata)
        if stream.closed or stream.local_closed:
            return
        connection = self._protocol.connection

        def last() -> bytes:
            fields = trailers(code, message, metadata)
            if not self._answered:
                fields = [*ANSWER, *fields]
            return connection.headers(stream.stream_id, fields, end=True)

        stream.end(last)
        if not stream.closed:
            self._loop.call_later(LINGER_S, stream.reset, ErrorCode.CANCEL)

    def refused(self, error: StreamFailed) -> None:
        if not cast("Http2Stream", self._stream).blocked:
            self.finish(error.status, error.reason)
            self.failed(error)

    def failed(self, error: StreamFailed) -> None:
        super().failed(error)
        self.broken = True
        if self.task is not None:
            self.task.cancel()


async def _requests(context: SessionContext) -> AsyncIterator[Any]:
    """Yields a call's messages, for a handler that iterates over them."""
    while (message := await context.read()) is not EOF:
        yield message


class ServerProtocol(Http2Protocol):
    """The protocol of one client's connection."""

    def __init__(self, server: Http2Server, done: Callable[[], None], met: Callable[[], None]) -> None:
        super().__init__(lambda write: Http2Connection(write, self._opened), self._close_if_done, self._gone_)
        self._server = server
        self._met = met
        self._done = done
        self._made_s = self._loop.time()
        self._called = False
        """True once a call has come, unless all calls so far were refused."""
        self._served = False
        """True once a call was served."""
        self.contexts: set[SessionContext] = set()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.peer = ""
        self.identities: Sequence[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secured is not None:
            self.identities = _names(secured.getpeercert())
            self._met()
        super().connection_made(transport)
        self._server.protocols.add(self)
        if self._server.draining:
            self.close("the server has ended")

    def _look(self) -> None:
        if not self._called and self._loop.time() - self._made_s > IDLE_S:
            self.connection.leave()
            self.close("no call came")
        super()._look()

    @property
    def dead_ticks(self) -> int:
        return super().dead_ticks if self.contexts else IDLE_DEAD_TICKS

    def _opened(self, stream: Http2Stream, fields: Sequence[Field], end: bool) -> SessionContext:
        head = parse_request(fields)
        known = head if isinstance(head, Http2RequestHead) else Http2RequestHead("", None, ())
        context = SessionContext(self, stream, known)
        if not isinstance(head, Http2RequestHead):
            stream.end(lambda: self.connection.headers(stream.stream_id, [(b":status", str(head).encode())], end=True))
            return context
        self._called = True
        self._met()
        self.contexts.add(context)
        context.task = task = self._loop.create_task(self._server.serve(context, head), name=head.path)
        task.add_done_callback(lambda _: self._ended(context))
        return context

    def _ended(self, context: SessionContext) -> None:
        self.contexts.discard(context)
        self._served = self._served or context.served
        self._called = self._served or bool(self.contexts)  # a peer that is only refused has made no calls
        if context.served and not context.broken:
            self.connection.served()
        context.task = None
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Closes the connection in a drain, once all calls have ended and all data is sent."""
        if self._server.draining and not self.contexts and not self.connection.streams:
            self.close("the server has ended")

    def _gone_(self) -> None:
        self.gone.set_result(None)
        self._server.protocols.discard(self)
        self._done()


class Http2Server:
    """A server that is used as one of grpcio: ``add`` handlers, bind the ``listener``, ``start`` → ``stop``."""

    def __init__(self, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Takes ``tls`` of :class:`Listener`."""
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self.listener = Listener(lambda done, met: ServerProtocol(self, done, met), tls)
        self.protocols: set[ServerProtocol] = set()
        self.draining = False

    def add(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds a service's handlers, by their methods' names."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self) -> None:
        self.listener.start()

    async def stop(self, seconds: float) -> None:
        """Accepts no more connections and calls, lets present calls end for ``seconds``, then ends them."""
        self.listener.stop()
        self.draining = True
        until_s = asyncio.get_running_loop().time() + seconds
        for each in list(self.protocols):
            each.connection.leave()
            each._close_if_done()
        tasks = self._tasks()
        if tasks and seconds > 0:
            await asyncio.wait(tasks, timeout=seconds)
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        if tasks and (await asyncio.wait(tasks, timeout=FAREWELL_S))[1]:
            _log.warning("calls go on although they were cancelled; their connections are closed")
        await asyncio.sleep(0)  # so that the calls' last data is written
        gone = [each.gone for each in self.protocols]
        left_s = min(LINGER_S, until_s - asyncio.get_running_loop().time())
        if gone and left_s > 0:  # some peers have not read all data yet
            await asyncio.wait(gone, timeout=left_s)
        for each in list(self.protocols):
            each.close("the server has ended")
        if gone := [each.gone for each in self.protocols]:
            # Written data goes out, and TLS is closed properly, if the peer still listens.
            await asyncio.wait(gone, timeout=FAREWELL_S if seconds > 0 else 0)
            left = list(self.protocols)
            for each in left:
                each.abort("the server has ended")
            if left:  # sockets are closed in the next turn of the loop
                await asyncio.wait([each.gone for each in left], timeout=FAREWELL_S)
        await self.listener.close()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [context.task for each in self.protocols for context in each.contexts if context.task is not None]

    async def serve(self, context: SessionContext, head: Http2RequestHead) -> None:
        """Serves one call to its end. Raises nothing."""
        try:
            async with asyncio.timeout(head.timeout_s):
                handler: Any = self._handlers.get(head.path)
                if handler is None:
                    context.finish("UNIMPLEMENTED", "Method not found!")
                    return
                context.codecs(handler.request_deserializer, handler.response_serializer)
                if handler.response_streaming:
                    await handler.stream_stream(_requests(context), context)
                else:
                    answer = await handler.stream_unary(_requests(context), context)
                    with together(context.connection):
                        if context.push(answer):
                            context.served = True
                            context.finish()
                            return
                    await context.write(answer)
            context.served = True
            context.finish()
        except grpc.aio.AbortError:
            context.finish()
        except TimeoutError:
            context.finish("DEADLINE_EXCEEDED", "Deadline Exceeded")
        except asyncio.CancelledError:
            context.finish("UNAVAILABLE", "the server is shutting down")
        except Exception as error:
            if not isinstance(error, asyncio.InvalidStateError):  # the peer of the write has left
                _log.error("uncaught error in %s", head.path, exc_info=error)
            context.finish("UNKNOWN", "internal error")


def _names(certificate: Any) -> Sequence[bytes] | None:
    """Returns the DNS names of a certificate; None if it has none."""
    names = [name.encode() for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]
    return names or None
