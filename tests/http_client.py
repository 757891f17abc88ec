"""An HTTP/1.1 client whose tests see every byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from dataclasses import dataclass
from typing import Self

from tests.waiting import WAIT_S


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of each server-sent event."""
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == ""
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [part.removeprefix("data: ") for part in parts[:-1]]


class Connection:
    """An HTTP/1.1 client that sends exactly what the test says."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.tls = tls

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24, ssl=self.tls)
        return self

    async def __aexit__(self, *_) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: lb"]
        given = dict(headers or {})
        if body is not None and "content-length" not in given and "transfer-encoding" not in given:
            given["content-length"] = str(len(body))
        lines += [f"{name}: {value}" for name, value in given.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b""))

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(WAIT_S):
            raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw[:-4].split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    async def chunk(self) -> bytes:
        """Reads one HTTP chunk, which is empty at the end."""
        async with asyncio.timeout(WAIT_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def reply(self) -> Reply:
        status, headers = await self.head()
        async with asyncio.timeout(WAIT_S):
            if "content-length" in headers:
                return Reply(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return Reply(status, headers, body)

    def drop(self) -> None:
        self.writer.transport.abort()
