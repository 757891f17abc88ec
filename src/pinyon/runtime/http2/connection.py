"""One HTTP/2 connection that carries gRPC streams, either side of it. No I/O: bytes in, calls and bytes out.

Between its beginning and its end, a session has only DATA frames. A few lines here and in
:mod:`pinyon.runtime.http2.stream` read and write them. Header blocks are hpack's.

A peer's demands are bounded: frames of 64 KiB, header blocks of 16 KiB, 64 streams at once, windows of 1 MiB each. All
work that it causes except messages is counted in units of about 2 µs each in Python. A connection has a number of units
per tick, and ends when its peer asks for more."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from hpack import Decoder, Encoder, HPACKError  # type: ignore[import-untyped,unused-ignore]

from pinyon.runtime.http2 import wire
from pinyon.runtime.http2.stream import Field, Http2Stream, Receiver, StreamFailed, StreamLink
from pinyon.runtime.http2.wire import DATA, END_STREAM, FRAME_HEAD, HEAD_BYTES, MAX_WINDOW, ConnectionFailed, ErrorCode

STREAM_WINDOW: Final = 1 << 20
STREAMS_MAX: Final = 64
CONNECTION_WINDOW: Final = STREAMS_MAX * STREAM_WINDOW
"""The sum of all streams' windows, so that unread data of one stream never blocks another stream."""
FRAME_BYTES: Final = 64 << 10
HEADER_BLOCK_BYTES: Final = 16 << 10
HEADER_TABLE_BYTES: Final = 4096
FAREWELL_CHARS: Final = 200
"""The largest number of characters that are kept of a peer's reason to leave."""
WORK_UNITS: Final = 6000
"""The units that a peer may cost between two ticks; more is an attack. 64 common calls begun at once take 4,000."""
FRAME_UNITS: Final = 1
"""The cost of a frame without a message, of a field of a header block, and of a stream that may go on."""
ANSWERED_UNITS: Final = 4
"""The cost of a frame that is answered by a frame."""
PAYLOAD_BYTES: Final = 64
"""The number of bytes of a frame without a message that cost one more unit."""
BLOCK_BYTES: Final = 16
"""The number of bytes of a header block that cost one more unit."""
STREAMS_A_UNIT: Final = 8
"""One unit pays for the check of this many streams whether they can go on."""
CALL_UNITS: Final = 32
"""The cost of opening a stream, since it has to be served."""
ANSWER_UNITS: Final = 32
"""The credit for a stream that this side opens, as its head and trailers will come."""
SERVED_UNITS: Final = 64
"""The credit for a call that was served to its end: the cost of its stream and a head of some 20 fields."""
_RESIZED = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")
"""A header block that begins with three changes of the table's size; no more than two are needed (RFC 7541, 4.2)."""

_REFERENCES = re.compile(rb"[\x81-\xfe]{1,32}")
"""A header block of nothing but references to the tables: it changes neither side's, so it always means the same until
a block that does (RFC 7541, 6.1). Calls that are made again and again have such heads and trailers."""
REMEMBERED_MAX: Final = 8
"""The largest number of such blocks that either way of a connection remembers."""


class Http2Connection(StreamLink):
    """A connection; ``write`` sends bytes to the peer, and the bytes in ``opening`` have to be sent first.

    On a server's side, ``opened`` is called with each new stream, its headers and whether these end it. It returns the
    stream's receiver, and may end the stream."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        opened: Callable[[Http2Stream, Sequence[Field], bool], Receiver] | None = None,
        *,
        stream_window: int = STREAM_WINDOW,
    ) -> None:
        super().__init__(write, stream_window)
        self._opened = opened
        self._server = opened is not None
        self.ready = False
        """True once the peer's settings have come."""
        self.peer_streams_max = MAX_WINDOW
        self.leaving = False
        """True once either side has said that no more streams are opened here."""
        self.farewell = ""
        """The peer's reason to leave, in its words."""
        self._peer_window = wire.DEFAULT_WINDOW
        self._window = CONNECTION_WINDOW
        self._streams: dict[int, Http2Stream] = {}
        self._last_id = 0
        """The id of the last stream that the client has opened."""
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._wanted = HEAD_BYTES
        """The number of bytes that must be here before parsing goes on."""
        self._preface = len(wire.PREFACE) if self._server else 0
        self._block: bytearray | None = None
        """The header block that is arriving, or None."""
        self._block_id = 0
        self._block_end = False
        self._work = 0
        """The units spent since the last tick."""
        self._encoder = Encoder()
        self._decoder = Decoder(max_header_list_size=HEADER_BLOCK_BYTES)
        self._encoded: dict[tuple[Field, ...], bytes] = {}
        self._decoded: dict[bytes, list[Field]] = {}
        self._settled = False
        own = {wire.MAX_CONCURRENT_STREAMS: STREAMS_MAX} if self._server else {wire.ENABLE_PUSH: 0}
        own |= {
            wire.INITIAL_WINDOW_SIZE: stream_window,
            wire.MAX_FRAME_SIZE: FRAME_BYTES,
            wire.MAX_HEADER_LIST_SIZE: HEADER_BLOCK_BYTES,
        }
        self.opening = wire.settings(own) + wire.window_update(0, CONNECTION_WINDOW - wire.DEFAULT_WINDOW)
        if not self._server:
            self.opening = wire.PREFACE + self.opening

    @property
    def streams(self) -> list[Http2Stream]:
        """The open streams."""
        return list(self._streams.values())

    # -- sending

    def open(self, fields: Sequence[Field], receiver: Receiver) -> Http2Stream:
        """Opens a stream on a client's side. Raises :class:`StreamFailed` if the peer takes no more."""
        if self.leaving or len(self._streams) >= self.peer_streams_max:
            raise StreamFailed(ErrorCode.REFUSED_STREAM, "the peer takes no more streams", "UNAVAILABLE")
        self._last_id += 2 if self._last_id else 1
        self._work = max(0, self._work - ANSWER_UNITS)
        stream = Http2Stream(self, self._last_id, self._peer_window, self.stream_window)
        stream.receiver = receiver
        self._streams[stream.stream_id] = stream
        self.write(self.headers(stream.stream_id, fields, end=False))
        return stream

    def headers(self, stream_id: int, fields: Sequence[Field], *, end: bool) -> bytes:
        """Returns the frames of a header block, to be sent in the order in which they are made: hpack has state."""
        known = tuple(fields)
        block: bytes | None = self._encoded.get(known)
        if block is None:
            block = self._encoder.encode(fields)
            _remember(self._encoded, known, block, block)
        size = self.send_frame
        flags = END_STREAM if end else 0
        if len(block) <= size:
            return wire.frame(wire.HEADERS, flags | wire.END_HEADERS, stream_id, block)
        parts = [wire.frame(wire.HEADERS, flags, stream_id, block[:size])]
        for at in range(size, len(block), size):
            last = wire.END_HEADERS if at + size >= len(block) else 0
            parts.append(wire.frame(wire.CONTINUATION, last, stream_id, block[at : at + size]))
        return b"".join(parts)

    def ping(self) -> None:
        self.write(wire.ping(b"\0" * 8, ack=False))

    def tick(self) -> None:
        """Renews the units, every few tenths of a second; a late tick gives no more than any other."""
        self._work = 0

    def served(self) -> None:
        """Credits a call that was served to its end; broken calls get none, as a peer may open these without limit."""
        self._work = max(0, self._work - SERVED_UNITS)

    def leave(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Accepts no more streams. Open ones go on, or, with an error ``code``, end with the connection."""
        self.leaving = True
        self.write(wire.goaway(self._last_id if self._server else 0, code, reason))

    def forget(self, stream: Http2Stream) -> None:
        self._streams.pop(stream.stream_id, None)

    def lost(self, reason: str) -> None:
        """Fails all streams, as the connection is gone."""
        self.leaving = True
        if self.farewell:
            reason = f"{reason}; the peer's last word was {self.farewell}"
        for stream in self.streams:
            stream.fail(StreamFailed(ErrorCode.CONNECT_ERROR, reason, "UNAVAILABLE"))

    # -- receiving

    def receive(self, data: bytes) -> None:
        """Handles bytes from the peer. Raises :class:`ConnectionFailed`: :meth:`leave` with its code, then close."""
        if self._rest:
            self._rest.append(data)
            self._rest_bytes += len(data)
            if self._rest_bytes < self._wanted:
                return
            data = b"".join(self._rest)
            self._rest.clear()
            self._rest_bytes = 0
        at, end = 0, len(data)
        if self._preface:
            at = min(self._preface, end)
            have = len(wire.PREFACE) - self._preface
            if data[:at] != wire.PREFACE[have : have + at]:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
            self._preface -= at
        while True:
            left = end - at
            if left < HEAD_BYTES:
                self._wanted = HEAD_BYTES
                break
            high, low, kind, flags, stream_id = FRAME_HEAD.unpack_from(data, at)
            size = (high << 8) | low
            if size > FRAME_BYTES:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if left < HEAD_BYTES + size:
                self._wanted = HEAD_BYTES + size
                break
            at += HEAD_BYTES
            stream_id &= MAX_WINDOW
            if kind == DATA and self._block is None and self._settled:
                self._data(data, at, at + size, flags, stream_id)
            else:
                self._other(kind, flags, stream_id, data[at : at + size])
            at += size
        if at < end:
            self._rest.append(data[at:])
            self._rest_bytes = end - at

    def _data(self, data: bytes, at: int, end: int, flags: int, stream_id: int) -> None:
        counted = end - at
        self._window -= counted
        if self._window < 0:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "more data than there was room for")
        if self._window * 2 < CONNECTION_WINDOW:
            self.write(wire.window_update(0, CONNECTION_WINDOW - self._window))
            self._window = CONNECTION_WINDOW
        if flags & wire.PADDED:
            at, end = _unpadded(data, at, end)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._closed(stream_id, "data")
            self._spend(FRAME_UNITS)
            return
        try:
            whole = stream.data(data, at, end, counted, bool(flags & END_STREAM))
        except StreamFailed as error:
            self._fail(stream, error)
            return
        if not whole and end - at < PAYLOAD_BYTES and not flags & END_STREAM:
            self._spend(FRAME_UNITS)

    def _other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._settled:
            if kind != wire.SETTINGS or flags & wire.ACK:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "no settings came first")
            self._settled = True
        begun = self._block is not None
        if begun != (kind == wire.CONTINUATION) or (begun and stream_id != self._block_id):
            what = "a header block was interrupted" if begun else "a header block goes on that nobody began"
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, what)
        units = ANSWERED_UNITS if kind in (wire.PING, wire.SETTINGS) else FRAME_UNITS
        self._spend(units + len(payload) // PAYLOAD_BYTES)
        if kind == wire.HEADERS:
            self._headers(flags, stream_id, payload)
        elif kind == wire.CONTINUATION:
            self._continue(payload, bool(flags & wire.END_HEADERS))
        elif kind == wire.WINDOW_UPDATE:
            self._window_update(stream_id, payload)
        elif kind == wire.PING:
            self._ping(flags, stream_id, payload)
        elif kind == wire.SETTINGS:
            self._settings(flags, stream_id, payload)
        elif kind == wire.RST_STREAM:
            self._reset(stream_id, payload)
        elif kind == wire.GOAWAY:
            self._goaway(stream_id, payload)
        elif kind == DATA:
            raise AssertionError("unreachable: data comes after settings and outside of header blocks")
        elif kind == wire.PUSH_PROMISE:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "push is off")
        elif kind == wire.PRIORITY:
            if not stream_id:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a priority of no stream")
            if len(payload) != 5:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a priority has 5 bytes")
        # Unknown frames are skipped (section 4.1).

    def _spend(self, units: int) -> None:
        """Counts work that the peer causes. Raises :class:`ConnectionFailed` if it is too much."""
        self._work += units
        if self._work > WORK_UNITS:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too much work beside messages")

    # -- headers

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        at, end = 0, len(payload)
        if flags & wire.PADDED:
            at, end = _unpadded(payload, at, end)
        if flags & wire.WITH_PRIORITY:
            at += 5
            if at > end:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "no room for the priority")
        if not stream_id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"headers on stream {stream_id}")
        if not self._server and stream_id > self._last_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "headers of a stream that nobody opened")
        if self._server and stream_id <= self._last_id and stream_id not in self._streams:
            # gRPC's clients send no headers but those that open a stream. A server's answer may be under way.
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, "headers of a stream that is over")
        self._block = bytearray()
        self._block_id = stream_id
        self._block_end = bool(flags & END_STREAM)
        self._continue(payload[at:end], bool(flags & wire.END_HEADERS))

    def _continue(self, payload: bytes, last: bool) -> None:
        block = self._block
        assert block is not None
        block += payload
        if len(block) > HEADER_BLOCK_BYTES:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {HEADER_BLOCK_BYTES} bytes")
        if not last:
            return
        self._block = None
        self._spend(len(block) // BLOCK_BYTES)
        if _RESIZED.match(block):
            raise ConnectionFailed(
                ErrorCode.COMPRESSION_ERROR, "headers that change their table's size again and again"
            )
        packed = bytes(block)
        fields = self._decoded.get(packed)
        if fields is None:
            try:
                fields = [(name, value) for name, value in self._decoder.decode(packed, raw=True)]
            except HPACKError as error:
                raise ConnectionFailed(
                    ErrorCode.COMPRESSION_ERROR, f"headers cannot be read: {type(error).__name__}"
                ) from None
            _remember(self._decoded, packed, fields, packed)
        self._spend(len(fields) * FRAME_UNITS)
        stream = self._streams.get(self._block_id)
        if stream is not None:
            self._more_headers(stream, fields)
        elif self._server:
            self._open(fields)

    def _more_headers(self, stream: Http2Stream, fields: list[Field]) -> None:
        if stream.remote_closed:
            self._fail(stream, StreamFailed(ErrorCode.STREAM_CLOSED, "headers after the end of the stream"))
            return
        if self._server and not self._block_end:
            self._fail(stream, StreamFailed(ErrorCode.PROTOCOL_ERROR, "trailers that are not the end"))
            return
        if not self._server:
            stream.receiver.headed(fields, self._block_end)
        if self._block_end and not stream.closed:
            stream.end_of_remote()

    def _open(self, fields: list[Field]) -> None:
        self._last_id = stream_id = self._block_id
        self._spend(CALL_UNITS)
        if len(self._streams) >= STREAMS_MAX or self.leaving:
            self.write(wire.reset(stream_id, ErrorCode.REFUSED_STREAM))
            return
        stream = Http2Stream(self, stream_id, self._peer_window, self.stream_window)
        self._streams[stream_id] = stream
        assert self._opened is not None
        stream.receiver = self._opened(stream, fields, self._block_end)
        if self._block_end and not stream.closed:
            stream.end_of_remote()

    # -- frames about streams and the connection

    def _closed(self, stream_id: int, what: str) -> None:
        """Accepts a frame of a stream that is over. Raises :class:`ConnectionFailed` if the stream was never open."""
        if not stream_id or not stream_id & 1 or stream_id > self._last_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"{what} of stream {stream_id}, which nobody opened")

    def _fail(self, stream: Http2Stream, error: StreamFailed) -> None:
        if error.status and not stream.closed:
            stream.receiver.refused(error)
        if not stream.closed:
            self.write(wire.reset(stream.stream_id, error.code))
            stream.fail(error)

    def _window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a window update has 4 bytes")
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        if not stream_id:
            if not increment:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a window update of nothing")
            self.send_window += increment
            if self.send_window > MAX_WINDOW:
                raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window update that cannot be")
            self._pump()
            return
        stream_ = self._streams.get(stream_id)
        if stream_ is None:
            self._closed(stream_id, "a window update")
            return
        stream_.send_window += increment
        if not increment:
            self._fail(stream_, StreamFailed(ErrorCode.PROTOCOL_ERROR, "a window update of nothing"))
        elif stream_.send_window > MAX_WINDOW:
            self._fail(stream_, StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window update that cannot be"))
        elif stream_.blocked:
            stream_.pump()

    def _pump(self) -> None:
        """Sends waiting data of all streams, as the peer may have more room."""
        blocked = [stream for stream in self._streams.values() if stream.blocked]
        self._spend(len(self._streams) // STREAMS_A_UNIT + len(blocked) * FRAME_UNITS)
        for stream in blocked:
            stream.pump()

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) != 8:
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            raise ConnectionFailed(code, "a ping that cannot be")
        if not flags & wire.ACK:
            self.write(wire.ping(payload, ack=True))

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % 6 or (flags & wire.ACK and payload):
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "settings that cannot be")
        if flags & wire.ACK:
            return
        for name, value in dict(struct.iter_unpack(">HI", payload)).items():  # the last value of each setting counts
            if name == wire.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window that cannot be")
                change, self._peer_window = value - self._peer_window, value
                for stream in self.streams:
                    stream.send_window += change
                    if stream.send_window > MAX_WINDOW:
                        raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window that cannot be")
            elif name == wire.MAX_FRAME_SIZE:
                if not wire.DEFAULT_FRAME <= value < 1 << 24:
                    raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a size of frames that cannot be")
                self.send_frame = min(value, FRAME_BYTES)
            elif name == wire.HEADER_TABLE_SIZE:
                self._encoder.header_table_size = min(value, HEADER_TABLE_BYTES)
                self._encoded.clear()
                changes = self._encoder.table_size_changes
                if len(changes) > 2:  # hpack sends all in the next block; the least and the last suffice
                    changes[:] = [min(changes), changes[-1]]
            elif name == wire.MAX_CONCURRENT_STREAMS:
                self.peer_streams_max = value
            elif name == wire.ENABLE_PUSH and (value > 1 or (value and not self._server)):
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a setting of push that cannot be")
        self.ready = True
        self.write(wire.frame(wire.SETTINGS, wire.ACK, 0, b""))
        self._pump()  # after the ACK, as the peer has the old room until it reads that

    def _reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a reset has 4 bytes")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._closed(stream_id, "a reset")
            return
        code = int.from_bytes(payload, "big")
        known = ErrorCode(code) if code in ErrorCode._value2member_map_ else ErrorCode.INTERNAL_ERROR
        stream.fail(StreamFailed(known, f"the peer reset the stream ({known.name})", _STATUS.get(known, "INTERNAL")))

    def _goaway(self, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a farewell of a stream")
        if len(payload) < 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a farewell that cannot be")
        self.leaving = True
        last, code = int.from_bytes(payload[:4], "big") & MAX_WINDOW, int.from_bytes(payload[4:8], "big")
        if code != ErrorCode.NO_ERROR or len(payload) > 8:
            name = ErrorCode(code).name if code in ErrorCode._value2member_map_ else str(code)
            said = payload[8 : 8 + FAREWELL_CHARS].decode("ascii", "replace")
            self.farewell = f"{name}: {said}" if said.isprintable() and said else name
        if not self._server:
            reason = f"the peer is leaving ({self.farewell})" if self.farewell else "the peer is leaving"
            for stream in self.streams:
                if stream.stream_id > last:  # the peer has not begun to serve it, whatever the reason
                    stream.fail(StreamFailed(ErrorCode.REFUSED_STREAM, reason, "UNAVAILABLE"))


_STATUS: Final[dict[ErrorCode, str]] = {
    # gRPC over HTTP/2: the status of an end without trailers.
    ErrorCode.REFUSED_STREAM: "UNAVAILABLE",
    ErrorCode.CANCEL: "CANCELLED",
    ErrorCode.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    ErrorCode.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}


def _remember(known: dict[Any, Any], key: object, value: object, block: bytes) -> None:
    """Remembers what a header block stands for, or forgets everything after one that may have changed the table."""
    if len(known) >= REMEMBERED_MAX or not _REFERENCES.fullmatch(block):
        known.clear()
    else:
        known[key] = value


def _unpadded(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at == end or at + 1 + data[at] > end:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "more padding than there is room for")
    return at + 1, end - data[at]
