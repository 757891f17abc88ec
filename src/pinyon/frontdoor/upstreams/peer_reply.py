"""An answer to another region's load balancer, which passes it on to the client."""

from __future__ import annotations

import asyncio
from typing import Any

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import PinyonError
from pinyon.frontdoor.regions.inbound import InboundSession
from pinyon.frontdoor.regions.raw_streams import PIECE_BYTES, WINDOW_BYTES
from pinyon.http.answer import JSON, STREAM
from pinyon.messages.error import error_to_proto


class PeerReply:
    """The :class:`pinyon.http.answer.Reply` of one request. It waits while the other region does not take it."""

    __slots__ = ("_answer", "_more", "_session", "_stream_id", "_window", "begun", "done")

    def __init__(self, session: InboundSession[Any], stream_id: int) -> None:
        self._session = session
        self._stream_id = stream_id
        self._answer: peer_pb2.RawAnswer | None = None
        """The head of the answer, until it has been sent."""
        self._window = WINDOW_BYTES
        self._more = asyncio.Event()
        self.begun = False
        self.done = False

    def whole(self, status: int, body: bytes, content_type: bytes = JSON, fields: bytes = b"") -> None:
        self.begin(content_type, fields, status, len(body))
        self._put(body, end=True)

    def begin(self, content_type: bytes, fields: bytes = b"", status: int = 200, length: int = STREAM) -> None:
        self.begun = True
        kind = b"content-type: %b\r\n" % content_type if content_type else b""
        self._answer = peer_pb2.RawAnswer(status=status, fields=kind + fields)
        if length != STREAM:
            self._answer.length = length

    async def send(self, data: bytes) -> None:
        while self._window <= 0:
            self._more.clear()
            await self._more.wait()
        self._put(data)

    def push(self, data: bytes) -> bool:
        if self._window <= 0:
            return False
        self._put(data)
        return True

    async def end(self, data: bytes) -> None:
        if data:
            await self.send(data)
        self._put(b"", end=True)

    def fail(self, error: PinyonError) -> None:
        """Ends the answer with that error."""
        if not self.done:
            self.done = True
            self._session.put(peer_pb2.RawPiece(stream_id=self._stream_id, error=error_to_proto(error)))

    def taken(self, size: int) -> None:
        """Widens the window by bytes that the other side has taken."""
        self._window = min(WINDOW_BYTES, self._window + size)
        if self._window > 0:
            self._more.set()

    def _put(self, data: bytes, *, end: bool = False) -> None:
        self._window -= len(data)
        self.done = end
        for at in range(0, max(1, len(data)), PIECE_BYTES):
            piece = peer_pb2.RawPiece(stream_id=self._stream_id, data=data[at : at + PIECE_BYTES])
            if self._answer is not None:
                piece.answer.CopyFrom(self._answer)
                self._answer = None
            piece.end = end and at + PIECE_BYTES >= len(data)
            self._session.put(piece)
