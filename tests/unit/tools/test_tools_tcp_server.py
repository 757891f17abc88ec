"""The server that tests start leaves neither connections nor tasks behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from tests.tcp_server import tcp_server


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize("turns", range(8))
def test_connection_of_the_last_moment_is_closed(turns: int) -> None:
    """The connection waits to be accepted, or its handler is about to begin or has begun, when the loop ends."""

    async def last() -> socket.socket:
        async with tcp_server(silent) as server:
            client = socket.create_connection(server.sockets[0].getsockname())
            for _ in range(turns):
                await asyncio.sleep(0)
        return client

    with asyncio.run(last()) as client:
        client.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


async def test_handler_that_fails_fails_the_test() -> None:
    async def wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise KeyError("wrong")

    async def ask() -> None:
        async with tcp_server(wrong) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await reader.read() == b""
            writer.close()

    with pytest.raises(KeyError):
        await ask()
