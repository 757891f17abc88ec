"""One stream of a connection: gRPC messages under flow control, both ways. No I/O."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pinyon.runtime.http2 import wire
from pinyon.runtime.http2.wire import DATA, DEFAULT_FRAME, DEFAULT_WINDOW, END_STREAM, FRAME_HEAD, ErrorCode

Field = tuple[bytes, bytes]
"""The name and value of a header."""

MESSAGE_BYTES: Final = 4 << 20
"""The size limit of a received message."""
PREFIX_BYTES: Final = 5
KEPT_BYTES: Final = 64
"""The bytes that a kept message counts for, in addition to its own, so that empty messages count, too."""
_PREFIX: Final = struct.Struct(">BI")
"""The prefix of each gRPC message: whether it is compressed, and its length."""
_HEADS: Final = struct.Struct(">HBBBIBI")
"""A frame's head and a message's prefix together."""


UNFINISHED_MAX: Final = 4
"""The number of largest messages that may be incomplete on a connection at once.

The bytes of an incomplete message take no room of the stream's window, so a message can be larger than the window."""


class StreamFailed(Exception):
    """An end of a stream other than by a gRPC status of its peer.

    ``code`` is HTTP/2's; ``status`` is the name of the gRPC status that stands for it, if any."""

    def __init__(self, code: ErrorCode, reason: str, status: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.status = status


class StreamLink:
    """The part of a connection that its streams share: room, limits, and the way to the peer."""

    def __init__(self, write: Callable[[bytes], None], stream_window: int) -> None:
        self.write = write
        """A function that sends bytes to the peer."""
        self.stream_window = stream_window
        """The bytes of a stream that may be under way to this side."""
        self.unfinished = 0
        """The bytes of incomplete messages, of all streams together."""
        self.send_window = DEFAULT_WINDOW
        """The bytes that the peer has room for, of all streams together."""
        self.send_frame = DEFAULT_FRAME
        """The largest payload of a frame that the peer takes, in bytes."""

    def forget(self, stream: Http2Stream) -> None:
        """Removes a stream that is over."""
        raise NotImplementedError


class Receiver(Protocol):
    """The receiver of a stream's messages. Its methods may not raise, nor end the connection directly."""

    def headed(self, fields: Sequence[Field], end: bool) -> None:
        """Takes headers: the first ones, or, if ``end``, the trailers."""

    def message(self, message: bytes) -> None:
        """Takes a message. Call ``Http2Stream.taken`` with its length once it is processed."""

    def half_closed(self) -> None:
        """Notes that the peer sends nothing more, after trailers or without."""

    def refused(self, error: StreamFailed) -> None:
        """Notes that received data is refused. A server may end the stream with that status; else the stream fails."""

    def failed(self, error: StreamFailed) -> None:
        """Notes that the stream is over for both sides; the last call."""

    def writable(self) -> None:
        """Notes that all data sent so far has gone to the connection."""


class Nobody:
    """A receiver that ignores everything."""

    def headed(self, fields: Sequence[Field], end: bool) -> None: ...

    def message(self, message: bytes) -> None: ...

    def half_closed(self) -> None: ...

    def refused(self, error: StreamFailed) -> None: ...

    def failed(self, error: StreamFailed) -> None: ...

    def writable(self) -> None: ...


NOBODY: Final[Receiver] = Nobody()


class Http2Stream:
    """A stream, made by its connection.

    It keeps messages for which the peer has no room: at most one, if senders check ``blocked``."""

    def __init__(self, connection: StreamLink, stream_id: int, send_window: int, window: int) -> None:
        self._connection = connection
        self.receiver: Receiver = NOBODY
        self.stream_id = stream_id
        self.send_window = send_window
        """The bytes that the peer has room for; may be negative for a while (section 6.9.2)."""
        self._window = window
        """The bytes that this side has room for."""
        self._held = 0
        """The bytes of messages that the receiver holds and has not processed yet."""
        self._partial = bytearray()
        self._partial_told = 0
        """The part of these bytes that the connection has counted."""
        self._pending: deque[memoryview] = deque()
        self._trailers: Callable[[], bytes] | None = None
        self._ended = False
        """True once no more is to be sent; ``local_closed`` follows when the end is on the wire."""
        self.local_closed = False
        self.remote_closed = False
        self.closed = False

    # -- sending

    @property
    def blocked(self) -> bool:
        """True while sent data waits for room at the peer."""
        return bool(self._pending)

    def send(self, message: bytes) -> None:
        """Sends one gRPC message, uncompressed; does nothing on a stream that is over."""
        if self._ended or self.closed:
            return
        connection = self._connection
        size = len(message)
        total = size + PREFIX_BYTES
        if (
            not self._pending
            and total <= self.send_window
            and total <= connection.send_window
            and total <= connection.send_frame
        ):
            self.send_window -= total
            connection.send_window -= total
            connection.write(_HEADS.pack(total >> 8, total & 0xFF, DATA, 0, self.stream_id, 0, size) + message)
            return
        self._pending.append(memoryview(_PREFIX.pack(0, size) + message))
        self.pump()

    def end(self, trailers: Callable[[], bytes] | None = None) -> None:
        """Ends this side once all data is sent; on a server's side, ``trailers`` then makes the last frames."""
        if self._ended or self.closed:
            return
        self._ended = True
        self._trailers = trailers
        if not self._pending:
            self._finish()

    def pump(self) -> None:
        """Sends as much waiting data as there is room for."""
        connection = self._connection
        while self._pending:
            first = self._pending[0]
            size = min(len(first), self.send_window, connection.send_window, connection.send_frame)
            if size <= 0:
                return
            self.send_window -= size
            connection.send_window -= size
            connection.write(FRAME_HEAD.pack(size >> 8, size & 0xFF, DATA, 0, self.stream_id) + bytes(first[:size]))
            if size == len(first):
                self._pending.popleft()
            else:
                self._pending[0] = first[size:]
        if self._ended:
            self._finish()
        else:
            self.receiver.writable()

    def _finish(self) -> None:
        if self.local_closed:
            return
        connection = self._connection
        self.local_closed = True
        if self._trailers is None:
            connection.write(wire.frame(DATA, END_STREAM, self.stream_id, b""))
        else:
            connection.write(self._trailers())
            if not self.remote_closed:  # section 8.1: tells the peer that the rest of the request is not needed
                connection.write(wire.reset(self.stream_id, ErrorCode.NO_ERROR))
                self.remote_closed = True
        self._close_if_done()

    def reset(self, code: ErrorCode) -> None:
        """Ends the stream now, for both sides, without telling the receiver."""
        if not self.closed:
            self._connection.write(wire.reset(self.stream_id, code))
            self._close()

    # -- receiving

    def data(self, payload: bytes, at: int, end: int, counted: int, last: bool) -> bool:
        """Takes ``payload[at:end]`` of a frame that counts as ``counted`` bytes; returns whether it ends a message.

        Raises :class:`StreamFailed` for data that breaks gRPC's or this stream's rules."""
        if self.remote_closed:
            raise StreamFailed(ErrorCode.STREAM_CLOSED, "data after the end of the stream")
        self._window -= counted
        if self._window < 0:
            raise StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "more data than there was room for")
        partial = self._partial
        if partial:
            partial += memoryview(payload)[at:end]
            used = self._messages(bytes(partial), 0) if self._whole(partial) else 0
            del partial[:used]
            whole = used > 0
        else:
            used = self._messages(payload, at, end)
            whole = used > at
            if used < end:
                partial += memoryview(payload)[used:end]
        if last:
            if partial:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "the stream ended within a message", "INTERNAL")
            self.end_of_remote()
        if len(partial) != self._partial_told:
            self._tell_partial()
            connection = self._connection
            if partial and connection.unfinished > UNFINISHED_MAX * MESSAGE_BYTES:
                raise StreamFailed(ErrorCode.CANCEL, "too much of unfinished messages", "RESOURCE_EXHAUSTED")
        self._grant()
        return whole

    def _tell_partial(self) -> None:
        self._connection.unfinished += len(self._partial) - self._partial_told
        self._partial_told = len(self._partial)

    def _whole(self, partial: bytearray) -> bool:
        """Returns whether at least one message is complete. Raises :class:`StreamFailed` for a bad prefix."""
        if len(partial) < PREFIX_BYTES:
            return False
        return len(partial) - PREFIX_BYTES >= self._size(_PREFIX.unpack_from(partial))

    def _size(self, prefix: tuple[int, int]) -> int:
        compressed, size = prefix
        if compressed:
            raise StreamFailed(ErrorCode.CANCEL, "compressed messages are not taken", "UNIMPLEMENTED")
        if size > MESSAGE_BYTES:
            raise StreamFailed(
                ErrorCode.CANCEL, f"a message of {size} bytes: {MESSAGE_BYTES} are taken", "RESOURCE_EXHAUSTED"
            )
        return size

    def _messages(self, data: bytes, at: int, end: int = -1) -> int:
        """Passes complete messages to the receiver, and returns where the rest begins."""
        end = len(data) if end < 0 else end
        while end - at >= PREFIX_BYTES:
            size = self._size(_PREFIX.unpack_from(data, at))
            following = at + PREFIX_BYTES + size
            if following > end:
                break
            self._held += size + KEPT_BYTES
            self.receiver.message(data[at + PREFIX_BYTES : following])
            at = following
            if self.closed:
                return end
        return at

    def end_of_remote(self) -> None:
        self.remote_closed = True
        self.receiver.half_closed()
        self._close_if_done()

    def taken(self, nbytes: int) -> None:
        """Frees the room of a processed message of ``nbytes``."""
        self._held -= nbytes + KEPT_BYTES
        self._grant()

    def _grant(self) -> None:
        """Tells the peer of room when at least half of the window is free."""
        connection = self._connection
        # An incomplete message does not count, so that the rest of a message larger than the window can come.
        free = connection.stream_window - self._window - self._held
        if free * 2 >= connection.stream_window and not self.remote_closed and not self.closed:
            self._window += free
            connection.write(wire.window_update(self.stream_id, free))

    # -- the stream's end

    def fail(self, error: StreamFailed) -> None:
        """Ends the stream for both sides and tells the receiver; the connection tells the peer if need be."""
        if not self.closed:
            self._close()
            self.receiver.failed(error)

    def _close_if_done(self) -> None:
        if self.local_closed and self.remote_closed:
            self._close()

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._pending.clear()
            self._partial.clear()
            self._tell_partial()
            self._connection.forget(self)
