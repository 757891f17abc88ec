"""HTTP requests to another region, and their answers: bytes in pieces, no faster than they are taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import InvalidArgument, PinyonError
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD, Broke, NoRoom
from pinyon.messages.error import error_from_proto

PIECE_BYTES: Final = 256 << 10
"""The maximum size of a body's part in a message."""
WINDOW_BYTES: Final = 256 << 10
"""The bytes of an answer that may be sent without being taken; then the sender waits."""
TAKEN_BYTES: Final = WINDOW_BYTES // 4
"""The bytes that are taken before the sender is told."""
UNTAKEN_MAX: Final = 4 * WINDOW_BYTES
"""The untaken bytes that violate the protocol; a whole small answer, or one read's bytes, may exceed the window."""
HEAD_BYTES_MAX: Final = 64 << 10

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9a-z-]+): ([^\x00\r\n]*)")


class RawStreams:
    """The HTTP requests of one session, and the ``streams`` of their answers. ``send`` takes the session's messages,
    which are sent in order."""

    def __init__(self, region: str, send: Callable[[peer_pb2.SessionRequest], None]) -> None:
        self._region = region
        self.send = send
        self.streams: dict[int, _Stream] = {}
        self._opened = 0

    def __len__(self) -> int:
        return len(self.streams)

    def open(self, head: peer_pb2.RawHead, body: bytes | bytearray) -> Answer:
        """Sends a request, whose number is chosen here. The caller must close the answer, even if none comes."""
        self._opened = head.stream_id = self._opened + 1
        stream = self.streams[head.stream_id] = _Stream(self, head.stream_id, body)
        request = peer_pb2.RawRequest(head=head.SerializeToString(), hops=1, body=stream.next_piece())
        self.send(peer_pb2.SessionRequest(raw_requests=[request]))
        self._send_more(stream)
        return stream.answer

    def take(self, pieces: Iterable[peer_pb2.RawPiece]) -> None:
        """Delivers pieces to their streams."""
        for piece in pieces:
            stream = self.streams.get(piece.stream_id)
            if stream is not None:
                stream.take(piece)

    def written(self, message: peer_pb2.SessionRequest) -> None:
        """Continues the bodies of a sent message: each has one piece under way, with pieces of others in between."""
        for each in message.raw_bodies:
            stream = self.streams.get(each.stream_id)
            if stream is not None:
                self._send_more(stream)

    def end(self) -> int:
        """Ends all streams with the session. Returns how many."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.answer.broke(f"The region {self._region} went away.")
        return len(streams)

    def _send_more(self, stream: _Stream) -> None:
        if piece := stream.next_piece():
            self.send(peer_pb2.SessionRequest(raw_bodies=[peer_pb2.RawBody(stream_id=stream.stream_id, data=piece)]))


class _Stream:
    """The source of one answer."""

    __slots__ = ("_at", "_body", "_owner", "_paused", "_untaken", "answer", "stream_id")

    def __init__(self, owner: RawStreams, stream_id: int, body: bytes | bytearray) -> None:
        self._owner = owner
        self._body = body
        self._at = 0
        self._paused = False
        self._untaken = 0
        self.stream_id = stream_id
        self.answer = Answer(self)

    def next_piece(self) -> bytes:
        """Returns the next piece of the body; empty at its end."""
        piece = bytes(memoryview(self._body)[self._at : self._at + PIECE_BYTES])
        self._at += len(piece)
        return piece

    def take(self, piece: peer_pb2.RawPiece) -> None:
        answer = self.answer
        try:
            if piece.HasField("answer"):
                answer.begun = True
                self._head(piece.answer)
            if piece.HasField("error"):
                self._owner.streams.pop(self.stream_id, None)
                answer.failed(_failure(error_from_proto(piece.error), begun=answer.has_head))
                return
            if piece.data or piece.end:
                if not answer.has_head:
                    raise InvalidArgument("an answer without a head")
                self._data(piece.data)
        except InvalidArgument:
            self.give_up(answer)
            answer.broke("The other region's answer cannot be understood.")
            return
        if piece.end:
            self._owner.streams.pop(self.stream_id, None)
            answer.got_all()
        answer.arrived()

    def _head(self, head: peer_pb2.RawAnswer) -> None:
        if self.answer.has_head or not 200 <= head.status <= 599:
            raise InvalidArgument("a second head, or no status")
        length = head.length if head.HasField("length") else -1
        self.answer.got_head(head.status, read_fields(head.fields), length)

    def _data(self, data: bytes) -> None:
        if not data:
            return
        if self.answer.status in (204, 304):
            raise InvalidArgument("a body where there is none")
        self._untaken += len(data)
        if self._untaken > UNTAKEN_MAX:
            raise InvalidArgument("more than may be sent")
        self.answer.got(data)
        if not self._paused and self._untaken >= TAKEN_BYTES:
            self._tell()

    def _tell(self) -> None:
        taken, self._untaken = peer_pb2.RawTaken(stream_id=self.stream_id, bytes=self._untaken), 0
        if self.stream_id in self._owner.streams:
            self._owner.send(peer_pb2.SessionRequest(raw_taken=[taken]))

    # -- called by the answer

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if self._untaken:
            self._tell()

    def give_up(self, answer: Answer) -> None:
        if self._owner.streams.pop(self.stream_id, None) is not None:
            self._owner.send(peer_pb2.SessionRequest(cancel_stream_ids=[self.stream_id]))


def read_fields(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Returns header fields from the form that regions exchange. Raises :class:`InvalidArgument`."""
    if len(lines) > HEAD_BYTES_MAX:
        raise InvalidArgument("the header fields are too large")
    *found, rest = lines.split(b"\r\n")
    fields = [(field[1], field[2]) for line in found if (field := _LINE.fullmatch(line)) is not None]
    if rest or len(fields) < len(found):
        raise InvalidArgument("that is no header field")
    return fields


def _failure(error: PinyonError, *, begun: bool) -> PinyonError:
    """Returns the error that another region's error means here."""
    if not begun and error.field in (REGION_FIELD, REJECTED_FIELD):
        return NoRoom(error.message, lasting=error.field == REJECTED_FIELD)
    if not begun and isinstance(error, InvalidArgument):
        return error
    return Broke(error.message, begun=begun)
