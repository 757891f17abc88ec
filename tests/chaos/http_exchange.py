"""A client's keep-alive HTTP/1.1 connection that notes when the answer begins."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

CONNECT_S = 5.0
LINE_BYTES = 1 << 16


class Cut(Exception):
    """The connection ended before the answer was whole."""


@dataclass
class Exchange:
    """The state of an answer while it arrives."""

    began_s: float | None = None
    """The time at which its first byte arrived, by the monotonic clock."""


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    keep: bool

    def text(self) -> str:
        """Returns a completion's text, streamed or not. Raises ValueError, with the body, if none or unfinished."""
        if self.status != 200:
            raise ValueError(f"HTTP {self.status}: {self.body[:300].decode(errors='replace')}")
        if not self.body.startswith(b"data: "):
            (choice,) = json.loads(self.body)["choices"]
            return str(choice["text"])
        events = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        if events.pop() != b"[DONE]":
            raise ValueError("the stream has no end")
        texts, reason = [], None
        for event in map(json.loads, events):
            if "error" in event:
                raise ValueError(f"in the stream: {event['error'].get('message')}")
            for choice in event["choices"]:
                texts.append(choice["text"])
                reason = choice["finish_reason"] or reason
        if reason is None:
            raise ValueError("the stream has no finish_reason")
        return "".join(texts)


def completion(host: str, body: bytes) -> bytes:
    """Returns a request to ``/v1/completions``, head and body."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class HttpConnection:
    """A connection with the life ``open`` → ``exchange`` … → ``abort``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.used = False
        """True once it has carried an answer: the server may have closed it since."""

    @classmethod
    async def open(cls, address: str) -> HttpConnection:
        """Opens a connection. Raises OSError when nobody accepts in time."""
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                return cls(*await asyncio.open_connection(host, int(port), limit=LINE_BYTES))
        except TimeoutError:
            raise ConnectionError(f"{address} accepts nothing") from None

    @property
    def closed(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    async def exchange(self, request: bytes, seen: Exchange) -> Reply:
        """Sends a request and reads the whole answer. Raises :class:`Cut`."""
        try:
            self._writer.write(request)
            await self._writer.drain()
            head = await self._reader.readexactly(1)
            seen.began_s = time.monotonic()
            head += await self._reader.readuntil(b"\r\n\r\n")
            reply = await self._body(head)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Cut(str(error) or type(error).__name__) from None
        self.used = True
        return reply

    async def _body(self, head: bytes) -> Reply:
        lowered = head.lower()
        status, keep = int(head.split(b" ", 2)[1]), b"connection: close" not in lowered
        if b"content-length:" in lowered:
            length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
            return Reply(status, await self._reader.readexactly(length), keep)
        body = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return Reply(status, bytes(body), keep)

    def abort(self) -> None:
        """Closes the connection without a shutdown handshake."""
        self._writer.transport.abort()
