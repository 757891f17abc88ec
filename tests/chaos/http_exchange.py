"""A client's keep-alive HTTP/1.1 connection that notes when the answer begins."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from tests.http_client import Connection, Reply

CONNECT_S = 5.0


class Cut(Exception):
    """The connection ended before the answer was whole."""


@dataclass
class Exchange:
    """The state of an answer while it arrives."""

    began_s: float | None = None
    """The time at which its head had arrived, by the monotonic clock."""


def text_of(reply: Reply) -> str:
    """Returns a completion's text, streamed or not. Raises ValueError, with the body, if none or unfinished."""
    if reply.status != 200:
        raise ValueError(f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}")
    if not reply.body.startswith(b"data: "):
        (choice,) = reply.json["choices"]
        return str(choice["text"])
    events = [line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: ")]
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


class HttpConnection(Connection):
    """A connection with the life ``open`` → ``exchange`` … → ``drop``."""

    used = False
    """True once it has carried an answer: the server may have closed it since."""
    _seen = Exchange()

    @classmethod
    async def open(cls, address: str) -> HttpConnection:
        """Opens a connection. Raises OSError when nobody accepts in time."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return await cls(address).__aenter__()
        except TimeoutError:
            raise ConnectionError(f"{address} accepts nothing") from None

    @property
    def closed(self) -> bool:
        return self.reader.at_eof() or self.writer.is_closing()

    async def exchange(self, seen: Exchange, path: str, body: bytes | None = None) -> Reply:
        """Sends a request, a POST if it has a body, and reads the whole answer. Raises :class:`Cut`."""
        self._seen = seen
        try:
            self.send("GET" if body is None else "POST", path, body, {"content-type": "application/json"})
            await self.writer.drain()
            reply = await self.reply()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Cut(str(error) or type(error).__name__) from None
        self.used = True
        return reply

    async def head(self) -> tuple[int, dict[str, str]]:
        head = await super().head()
        self._seen.began_s = time.monotonic()
        return head
