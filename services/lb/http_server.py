"""The HTTP server: uvicorn's httptools protocol on our event loop, with limits on everything a client can hold.

What is added to uvicorn: a disconnect cancels the request's task (whatever it waits for), errors below the application
are OpenAI error objects too, a request that does not arrive and a reader that does not read are cut off after a while.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import uvicorn
from prometheus_client import Gauge
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pinyon.core.address import parse_address
from pinyon.core.errors import PinyonError, Unavailable
from pinyon.runtime.logging import get_logger
from services.lb.http_head import HttpError
from services.lb.openai_format import error_body

__all__ = ["HttpServer"]

BACKLOG = 2048
FAREWELL_S = 0.5
"""For the last answers to leave, once the time for draining is over."""
HEAD_CHUNKS_MAX = 64
"""Reads that one head may take, beside its time: each adds at most what the loop reads at once."""

_log = get_logger("lb.http")


class HttpServer:
    """``start`` → ``drain``. ``app`` is an ASGI application."""

    def __init__(
        self,
        app: Any,
        listen: str,
        *,
        connections: Gauge,
        connections_limit: int,
        keep_alive_s: float,
        request_timeout_s: float,
        write_stall_s: float,
    ) -> None:
        self._listen = listen
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            # Handed to call_later only, which takes floats too.
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        )
        config.load()
        self._state = uvicorn.server.ServerState()
        self._date: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None

        def protocol() -> _Protocol:
            made = _Protocol(config, self._state, {}, asyncio.get_running_loop())
            made.limits(connections, connections_limit, request_timeout_s, write_stall_s)
            return made

        self._protocol: Callable[[], _Protocol] = protocol

    async def start(self) -> str:
        """Bind and serve. Returns ``host:port``; raises :class:`Unavailable` if the port is taken."""
        host, port = parse_address(self._listen)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._protocol, host, port, backlog=BACKLOG)
        except OSError as error:
            raise Unavailable(f"cannot listen on {self._listen}: {error.strerror or error}") from None
        self._tick()
        bound = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    @property
    def connections(self) -> set[Any]:
        """Open ones."""
        return self._state.connections

    async def drain(self, seconds: float) -> None:
        """Accept nothing new, let requests finish for ``seconds``, then cancel them and close all connections."""
        if self._server is None:
            return
        self._server.close()
        connections = self.connections
        for connection in list(connections):
            connection.shutdown()  # idle ones close, the others do so after their answer
        tasks: set[asyncio.Task[None]] = self._state.tasks
        if tasks:
            await asyncio.wait(list(tasks), timeout=seconds)
        if tasks:
            _log.warning("%d requests are cut off at the end of the drain", len(tasks))
        for connection in list(connections):
            connection.end()
        if tasks:
            await asyncio.wait(list(tasks), timeout=FAREWELL_S)
        for connection in list(connections):
            connection.transport.abort()
        if tasks:
            await asyncio.wait(list(tasks))
        await self._server.wait_closed()
        self._server = None
        if self._date is not None:
            self._date.cancel()

    def _tick(self) -> None:
        """The Date header, made once per second."""
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._date = asyncio.get_running_loop().call_later(1.0, self._tick)


class _HeadWithBody:
    """Holds an answer's head back until its body follows in the same turn: one system call instead of two."""

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""

    def write(self, data: bytes) -> None:
        head = self._head
        if head is None:
            self._transport.write(data)
        elif head:
            self._head = None
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1.1 100 "):
            self._transport.write(data)
        else:
            self._head = data

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def flush(self) -> None:
        """An answer without a body (to HEAD) ends with its head."""
        if self._head:
            self._transport.write(self._head)
        self._head = None


class _Protocol(HttpToolsProtocol):
    """One connection."""

    def limits(
        self, connections: Gauge, connections_limit: int, request_timeout_s: float, write_stall_s: float
    ) -> None:
        self._gauge = connections
        self._connections_limit = connections_limit
        self._request_timeout_s = request_timeout_s
        self._write_stall_s = write_stall_s
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._head_chunks = 0
        self._in_message = self._in_head = False
        self._request: asyncio.Task[None] | None = None
        self._corked: _HeadWithBody | None = None

    # -- life of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._gauge.inc()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer that acknowledges nothing for this long is dead, also after its answer was written.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._write_stall_s * 1e3))
        if len(self.connections) > self._connections_limit:
            self._refuse(HttpError(503, "Too many connections."))
            return
        self._arrival_timer = self.loop.call_later(self._request_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gauge.dec()
        self._stop_timers()
        self._unset_keepalive_if_required()
        if self._request is not None and not self._request.done():
            self._request.cancel()
        # Pipelined requests that have not begun never will.
        self.pipeline.clear()

    def end(self) -> None:
        """End now; a request that has no answer yet is told why."""
        cycle = self.cycle
        if cycle is None or cycle.response_started or self.transport.is_closing():
            self._cut()
        else:
            self._refuse(HttpError(503, "The server is shutting down."))

    def _stop_timers(self) -> None:
        for timer in (self._arrival_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._arrival_timer = self._stall_timer = None

    def _late(self) -> None:
        if not self._in_message or (not self._in_head and self.cycle.response_started):
            self._cut()
        else:
            self._refuse(HttpError(408, "The request did not arrive in time."))

    def _cut(self) -> None:
        self.transport.abort()

    # -- requests on their way in

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_message or self.transport.is_closing():
            return
        if self._arrival_timer is None:
            self._arrival_timer = self.loop.call_later(self._request_timeout_s, self._late)
        if self._in_head:
            self._head_chunks += 1
            if self._head_chunks > HEAD_CHUNKS_MAX:
                self._refuse(HttpError(431, "The request's head is too large."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._head_chunks = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = False
        if self._arrival_timer is not None:
            self._arrival_timer.cancel()
            self._arrival_timer = None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # As uvicorn does, but the task is known here: connection_lost cancels it.
        cycle.transport = self._corked = _HeadWithBody(self.transport)
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._request = task

    def on_response_complete(self) -> None:
        if self._corked is not None:
            self._corked.flush()
        super().on_response_complete()

    # -- slow readers

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._write_stall_s, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # idle, or an answer that nobody has read since

    # -- errors below the application

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, msg))

    def _refuse(self, error: PinyonError) -> None:
        status = getattr(error, "status", error.http_status)
        body = error_body(error, status)
        self.transport.write(
            b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, len(body), body)
        )
        self.transport.close()
