"""An answer on its way from a server to a client: the bytes as they are, as they come, no faster than the client
reads."""

from __future__ import annotations

from typing import Final

from pinyon.core.clock import Clock
from services.lb.http_answer import STREAM, Reply
from services.lb.upstreams.answer import Answer
from services.lb.upstreams.fields import from_server
from services.lb.upstreams.stream_error import has_ended
from services.lb.upstreams.usage import TAIL_BYTES, Used, read_usage

__all__ = ["WHOLE_BYTES", "Passing"]

WHOLE_BYTES: Final = 256 << 10
"""An answer that is no stream of events and not larger is passed on when all of it is here: if it breaks off before,
the client is told so with a status."""
EVENT_BYTES: Final = 64 << 10
"""Of an event that is not here to its end are kept back: a client can do nothing with them, and an error may have to
follow."""
_EVENTS: Final = b"text/event-stream"
_ENDS: Final = (b"\n\n", b"\n\r\n")


class Passing:
    """One answer. ``begun`` says whether the client has seen anything of it."""

    __slots__ = ("_answer", "_clock", "_fields", "_kind", "_last", "_reply", "_tail", "begun", "events", "first_s")

    def __init__(self, answer: Answer, reply: Reply, rates: bytes, clock: Clock) -> None:
        """``rates``: lines that tell the client of its own limits."""
        self._answer = answer
        self._reply = reply
        self._clock = clock
        kind, fields = from_server(answer.fields, own_rates=bool(rates))
        self._kind, self._fields = kind, fields + rates
        self._tail = b""
        """The end of what was passed on."""
        self._last = b""
        """What came last, whole."""
        self.begun = False
        self.events = 0
        """Lines of data, about as many as tokens."""
        self.first_s = 0.0
        """When the first byte of its body was here."""

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def is_stream(self) -> bool:
        return self._kind.lower().startswith(_EVENTS)

    @property
    def said_all(self) -> bool:
        """A stream that breaks off now has ended all the same."""
        return has_ended(self._last)

    async def run(self) -> None:
        """To its end. Raises :class:`PinyonError` where the server's answer breaks off."""
        if self.is_stream:
            await self._stream()
        else:
            await self._whole()

    def used(self) -> Used | None:
        """What it took, if it says so."""
        return read_usage((self._tail + self._last)[-TAIL_BYTES:])

    async def _stream(self) -> None:
        answer, reply = self._answer, self._reply
        held = b""
        while data := await answer.read():
            if not self.first_s:
                self.first_s = self._clock()
            self.events += data.count(b"data:")
            if held:
                data = held + data
                held = b""
            if not data.endswith(_ENDS) and len(data) <= EVENT_BYTES:
                end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
                if end < 3:  # 2: nothing was found
                    held = data
                    continue
                data, held = data[:end], data[end:]
            self._note(data)
            if not self.begun:
                self._begin(STREAM)
            await reply.send(data)
        if not self.begun:
            self._begin(STREAM)
        await reply.end(held)

    async def _whole(self) -> None:
        answer, reply, length = self._answer, self._reply, self._answer.length
        pieces: list[bytes] = []
        size = 0
        while size <= WHOLE_BYTES and length <= WHOLE_BYTES:
            data = await answer.read()
            if not data:
                break
            if not self.first_s:
                self.first_s = self._clock()
            pieces.append(data)
            size += len(data)
        body = b"".join(pieces)
        if length <= WHOLE_BYTES and size <= WHOLE_BYTES:
            self._note(body)
            self.begun = True
            reply.whole(answer.status, body, self._kind, self._fields)
            return
        self._begin(length)
        if body:
            await reply.send(body)
        while data := await answer.read():
            self._note(data)
            await reply.send(data)
        await reply.end(b"")

    def _begin(self, length: int) -> None:
        self.begun = True
        self._reply.begin(self._kind, self._fields, self._answer.status, length)

    def _note(self, data: bytes) -> None:
        """For :meth:`used`: nothing is put together before the end."""
        if len(data) >= TAIL_BYTES:
            self._tail, self._last = b"", data
        else:
            self._tail, self._last = (self._tail + self._last)[-TAIL_BYTES:], data
