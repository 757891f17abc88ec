"""A TCP server for a test, written as one coroutine per connection; at its end nothing of it is left."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

ACCEPT_TURNS = 3
"""Turns of the loop until an accepted connection has arrived. A closed server of asyncio leaves it open."""

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(handle: Handle, tls: ssl.SSLContext | None = None) -> AsyncIterator[asyncio.Server]:
    """Serves on a free port of loopback. At the end connections are reset and their handlers awaited.

    A handler that failed by anything but its connection fails the test. ``asyncio.start_server`` takes a coroutine too,
    but starts a task that nobody else can await: cancelled before it begins, it closes no connection."""
    writers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
    """The handler of each connection so far, with the connection's writer."""
    ended = False

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handle(reader, writer)

    def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ended:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(run(reader, writer))
        writers[task] = writer
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(arrived, "127.0.0.1", 0, ssl=tls)
    try:
        yield server
    finally:
        ended = True
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        server.close()
        for writer in writers.values():
            with suppress(AttributeError):  # of TLS that has ended, in Python 3.11.2
                writer.transport.abort()
        for result in await asyncio.gather(*writers, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, OSError | EOFError):
                raise result
