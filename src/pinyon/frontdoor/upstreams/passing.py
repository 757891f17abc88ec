"""An answer on its way from a server to a client: its bytes unchanged, as they come, no faster than the client
reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.request import Usage
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Broke
from pinyon.frontdoor.upstreams.fields import from_server
from pinyon.http.answer import STREAM, Reply
from pinyon.openai.format import DONE, error_event, error_object

WHOLE_BYTES: Final = 256 << 10
"""The size up to which an answer that is no stream of events is passed on as a whole: if it breaks off before, the
client gets an error status."""
EVENT_BYTES: Final = 64 << 10
"""The bytes of an incomplete event that are kept back: a client cannot use them, and an error may have to follow."""
TAIL_BYTES: Final = 4 << 10
"""The bytes kept of an answer's end, where the usage stands: in all of OpenAI's objects and streams' last events."""
TOKENS_MAX: Final = 1 << 40
SEAM_BYTES: Final = 64
"""The end of a piece that is looked at again with the next one."""
_NAMES = (
    ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
    ("input_tokens", "output_tokens", "input_tokens_details"),
)
_EVENTS: Final = b"text/event-stream"
_ENDS: Final = (b"\n\n", b"\n\r\n")
_LAST: Final = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.failed",
                b"event: response.incomplete")  # fmt: skip
"""The beginnings of a stream's last event: of completions and chats, of Anthropic's messages, of responses."""
_decoder = json.JSONDecoder()


class Passing:
    """One answer on its way."""

    __slots__ = ("_behind", "_clock", "_fields", "_held", "_kind", "_recent", "_recent_bytes", "_reply",
                 "answer", "clean", "events", "first_s", "held_max", "is_stream")  # fmt: skip

    def __init__(
        self, answer: Answer, reply: Reply, rates: bytes, clock: Clock, clean: Callable[[bytes], bytes] | None = None
    ) -> None:
        """Takes the answer and the client's ``reply``; ``rates`` are lines about the client's own limits. All events,
        and an answer that is passed on as a whole, go through ``clean``; a longer answer must not need it."""
        self.clean = clean
        self.held_max = EVENT_BYTES
        self.answer = answer
        self._reply = reply
        self._clock = clock
        kind, fields = from_server(answer.fields, own_rates=bool(rates))
        self._kind, self._fields = kind, fields + rates
        self.is_stream = kind[: len(_EVENTS)].lower() == _EVENTS
        self._recent: list[bytes] = []
        """The last pieces that were passed on: at least the tail of the answer, and the last piece whole."""
        self._recent_bytes = 0
        self._held = bytearray()
        """The beginning of an incomplete event."""
        self._behind = b""
        """The bytes that the client had no room for."""
        self.events = 0
        """The number of data lines, about as many as tokens."""
        self.first_s = 0.0
        """The time at which the first byte of the body came."""

    @property
    def said_all(self) -> bool:
        """True if a stream is complete, even if it breaks off now: its last event is the end of one."""
        last = b"".join(self._recent).rstrip()
        start = max(last.rfind(b"\n\n") + 2, last.rfind(b"\n\r\n") + 3)
        return last[start if start > 2 else 0 :].startswith(_LAST)

    def run(self) -> Coroutine[Any, Any, None]:
        """Passes the answer on to its end. Raises :class:`PinyonError` if the server's answer breaks off."""
        return self._stream() if self.is_stream else self._whole()

    def used(self) -> Usage | None:
        """Returns the tokens that the answer took, if it says so."""
        return read_usage(b"".join(self._recent)[-TAIL_BYTES:])

    async def _stream(self) -> None:
        try:
            await self._events_to_the_end()
        except Broke as error:
            if error.before:
                self._begin(STREAM)
                await self._reply.send(error.before)
            raise

    async def _events_to_the_end(self) -> None:
        """Passes a stream on. While the client keeps up, this happens where bytes come in, and no task is woken."""
        answer, reply = self.answer, self._reply
        while True:
            await answer.pour(self._push)
            if self._behind:
                behind, self._behind = self._behind, b""
                await reply.send(behind)
            data = await answer.read()
            if answer.complete:
                break
            if events := self._events(data):
                self._begin(STREAM)
                await reply.send(events)
        self._came(data)
        last = self._cleaned(bytes(self._held) + data)
        self._note(last)
        self._begin(STREAM)
        await reply.end(last)

    def _push(self, data: bytes) -> bool:
        if self._held or not self._reply.begun or not data.endswith(_ENDS):
            events = self._events(data)
            if not events:
                return True
            self._begin(STREAM)
        else:  # the usual case
            events = self._cleaned(data)
            self.events += data.count(b"data:")
            self._note(events)
        if not events or self._reply.push(events):
            return True
        self._behind = events
        return False

    def _events(self, data: bytes) -> bytes:
        """Returns the part of ``data``, and of what was held back, that may be passed on now."""
        self._came(data)
        held = self._held
        seen = max(0, len(held) - 2)  # an end may begin in bytes that were searched before
        held += data
        end = len(held)
        if not held.endswith(_ENDS) and end <= self.held_max:
            end = max(held.rfind(b"\n\n", seen) + 2, held.rfind(b"\n\r\n", seen) + 3)
            if end < 3:  # 2: nothing was found
                return b""
        events = self._cleaned(bytes(held[:end]))
        del held[:end]
        self._note(events)
        return events

    async def _whole(self) -> None:
        answer, reply, length = self.answer, self._reply, self.answer.length
        pieces: list[bytes] = []
        size = 0
        while size <= WHOLE_BYTES and length <= WHOLE_BYTES:
            data = await answer.read()
            if not data:
                break
            self._came(data)
            pieces.append(data)
            size += len(data)
            if answer.complete:
                break
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if length <= WHOLE_BYTES and size <= WHOLE_BYTES:
            body = self._cleaned(body)
            self._note(body)
            reply.whole(answer.status, body, self._kind, self._fields)
            return
        self._begin(length)
        data, tail = body, b""
        while True:
            if data:
                self._check(tail + data)
                tail = data[-SEAM_BYTES:]
                self._note(data)
                await reply.send(data)
            data = await answer.read()
            if not data:
                break
        await reply.end(b"")

    def _cleaned(self, data: bytes) -> bytes:
        return data if self.clean is None else self.clean(data)

    def _check(self, data: bytes) -> None:
        """Breaks the answer off if a part of it would have to be cleaned."""
        if self.clean is not None and self.clean(data) is not data:
            raise Broke("The server's answer holds what no client may see.", begun=True)

    def _begin(self, length: int) -> None:
        if not self._reply.begun:
            self._reply.begin(self._kind, self._fields, self.answer.status, length)

    def _came(self, data: bytes) -> None:
        if not self.first_s and data:
            self.first_s = self._clock()
        if self.is_stream:
            self.events += data.count(b"data:")

    def _note(self, data: bytes) -> None:
        """Keeps data for :meth:`used`; many small pieces are joined now and then."""
        recent = self._recent
        self._recent_bytes += len(data)
        if self._recent_bytes > 2 * TAIL_BYTES and recent:
            tail = b"".join(recent)[-TAIL_BYTES:]
            recent[:] = [tail]
            self._recent_bytes = len(tail) + len(data)
        recent.append(data)


def stream_error(path: str, error: PinyonError) -> bytes:
    """Returns the events that end a broken stream such that clients of this route raise the error."""
    said = error_object(error, error.http_status)["error"]
    assert isinstance(said, dict)
    if path == "/v1/messages":
        return _event({"type": "error", "error": {"type": "api_error", "message": said["message"]}})
    if path == "/v1/responses":
        return _event({"type": "error", "code": said["code"], "message": said["message"], "param": None})
    return error_event(error) + DONE


def _event(data: dict[str, object]) -> bytes:
    return b"event: error\ndata: %b\n\n" % json.dumps(data).encode("ascii")


def read_usage(tail: bytes) -> Usage | None:
    """Returns the last valid usage in the tail, or None."""
    end = len(tail)
    for _ in range(4):  # a stream's last events may have ``"usage": null``
        at = tail.rfind(b'"usage"', 0, end)
        if at < 0:
            return None
        end = at
        start = tail.find(b"{", at, at + 16)
        if start < 0:
            continue
        try:
            usage, _ = _decoder.raw_decode(tail.decode("latin-1"), start)
        except (ValueError, RecursionError):
            continue
        if (used := _used(usage)) is not None:
            return used
    return None


def _used(usage: Any) -> Usage | None:
    if type(usage) is not dict:
        return None
    for prompt_name, completion_name, details_name in _NAMES:
        prompt = _count(usage.get(prompt_name))
        if prompt is not None:
            details = usage.get(details_name)
            cached = _count(details.get("cached_tokens")) if type(details) is dict else None
            return Usage(prompt, _count(usage.get(completion_name)) or 0, min(prompt, cached or 0))
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None
