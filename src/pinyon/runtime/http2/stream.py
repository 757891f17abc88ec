"""One stream of a connection: gRPC messages under flow control, both ways. No I/O."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pinyon.runtime.http2.wire import (
    DATA,
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    END_STREAM,
    FRAME_HEAD,
    Code,
    frame,
    reset,
    window_update,
)

Field = tuple[bytes, bytes]
"""Name and value of a header."""

PREFIX_BYTES: Final = 5
KEPT_BYTES: Final = 64
"""What a message that is kept takes beside its own bytes: empty ones count, too."""
_PREFIX: Final = struct.Struct(">BI")
"""Before each message of gRPC: whether it is compressed, and its length."""
_HEADS: Final = struct.Struct(">HBBBIBI")
"""A frame's head and a message's prefix in one."""


UNFINISHED_MAX: Final = 4
"""Messages of the largest size that may be on their way over a connection at once: what is there of one that is not
whole takes no room of the stream's window, so that it can be larger than that."""


class StreamFailed(Exception):
    """The stream is over, and not by what its peer said about it in gRPC's words.

    ``code`` is HTTP/2's; ``status`` is the name of gRPC's that stands for it, where one does.
    """

    def __init__(self, code: Code, reason: str, status: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.status = status


class Link:
    """What a connection's streams share of it: room, limits, and the way to the peer."""

    def __init__(self, write: Callable[[bytes], None], message_bytes: int, stream_window: int) -> None:
        self.write = write
        """Sends bytes to the peer."""
        self.message_bytes = message_bytes
        """Of a message that is taken, at most."""
        self.stream_window = stream_window
        """Bytes of a stream that may be under way to us."""
        self.unfinished = 0
        """Bytes of messages that are not whole yet, of all streams together."""
        self.send_window = DEFAULT_WINDOW
        """Bytes that the peer has room for, of all streams together."""
        self.send_frame = DEFAULT_FRAME
        """Bytes of a frame that it takes."""

    def forget(self, stream: Stream) -> None:
        """It is over."""
        raise NotImplementedError


class Receiver(Protocol):
    """Whoever a stream's messages are for. Nothing of it may raise, and nothing may end the connection at once."""

    def headed(self, fields: Sequence[Field], end: bool) -> None:
        """Headers came: the first ones, or the trailers, which are the end."""

    def message(self, message: bytes) -> None:
        """One came. Say ``Stream.taken`` with its length when it is done with."""

    def half_closed(self) -> None:
        """The peer sends nothing more, without trailers."""

    def refused(self, error: StreamFailed) -> None:
        """What came is not taken. A server may end the stream with that as its status; else it fails for that."""

    def failed(self, error: StreamFailed) -> None:
        """It is over for both sides. The last that is called."""

    def writable(self) -> None:
        """All that was sent has gone to the connection."""


class Nobody:
    """Receives nothing."""

    def headed(self, fields: Sequence[Field], end: bool) -> None: ...

    def message(self, message: bytes) -> None: ...

    def half_closed(self) -> None: ...

    def refused(self, error: StreamFailed) -> None: ...

    def failed(self, error: StreamFailed) -> None: ...

    def writable(self) -> None: ...


NOBODY: Final[Receiver] = Nobody()


class Stream:
    """Made by its connection. What is sent while the peer has no room is kept: one message, if ``blocked`` is asked."""

    __slots__ = (
        "_connection",
        "_ended",
        "_held",
        "_partial",
        "_partial_told",
        "_pending",
        "_trailers",
        "_window",
        "closed",
        "local_closed",
        "receiver",
        "remote_closed",
        "send_window",
        "stream_id",
    )

    def __init__(self, connection: Link, stream_id: int, send_window: int, window: int) -> None:
        self._connection = connection
        self.receiver: Receiver = NOBODY
        self.stream_id = stream_id
        self.send_window = send_window
        """Bytes that the peer has room for; may be negative for a while (section 6.9.2)."""
        self._window = window
        """Bytes that we have room for."""
        self._held = 0
        """Bytes of messages that the receiver has and did not take yet."""
        self._partial = bytearray()
        self._partial_told = 0
        """Of that, what the connection has counted."""
        self._pending: deque[memoryview] = deque()
        self._trailers: Callable[[], bytes] | None = None
        self._ended = False
        """No more is to be sent: ``local_closed`` when it is so on the wire."""
        self.local_closed = False
        self.remote_closed = False
        self.closed = False

    # -- sending

    @property
    def blocked(self) -> bool:
        """Something sent before waits for the peer's room."""
        return bool(self._pending)

    def send(self, message: bytes) -> None:
        """One gRPC message, uncompressed. Nothing is sent on a stream that is over."""
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
        """Nothing more comes: ``trailers`` makes the last frames of a server's side, when all before has gone."""
        if self._ended or self.closed:
            return
        self._ended = True
        self._trailers = trailers
        if not self._pending:
            self._finish()

    def pump(self) -> None:
        """Send of what waits as much as there is room for."""
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
            connection.write(frame(DATA, END_STREAM, self.stream_id, b""))
        else:
            connection.write(self._trailers())
            if not self.remote_closed:  # section 8.1: the rest of the request is not wanted
                connection.write(reset(self.stream_id, Code.NO_ERROR))
                self.remote_closed = True
        self._close_if_done()

    def reset(self, code: Code) -> None:
        """End it now, for both sides; the receiver is told nothing."""
        if not self.closed:
            self._connection.write(reset(self.stream_id, code))
            self._close()

    # -- what comes

    def data(self, payload: bytes, at: int, end: int, counted: int, last: bool) -> bool:
        """``payload[at:end]`` came in a frame that counts for ``counted`` bytes. Whether a message is whole by that.

        Raises :class:`StreamFailed` for what breaks gRPC's or this stream's rules.
        """
        if self.remote_closed:
            raise StreamFailed(Code.STREAM_CLOSED, "data after the end of the stream")
        self._window -= counted
        if self._window < 0:
            raise StreamFailed(Code.FLOW_CONTROL_ERROR, "more data than there was room for")
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
                raise StreamFailed(Code.PROTOCOL_ERROR, "the stream ended within a message", "INTERNAL")
            self.end_of_remote()
        if len(partial) != self._partial_told:
            self._tell_partial()
            connection = self._connection
            if partial and connection.unfinished > UNFINISHED_MAX * connection.message_bytes:
                raise StreamFailed(Code.CANCEL, "too much of unfinished messages", "RESOURCE_EXHAUSTED")
        self._grant()
        return whole

    def _tell_partial(self) -> None:
        self._connection.unfinished += len(self._partial) - self._partial_told
        self._partial_told = len(self._partial)

    def _whole(self, partial: bytearray) -> bool:
        """Whether at least one message is all here. Raises :class:`StreamFailed`."""
        if len(partial) < PREFIX_BYTES:
            return False
        return len(partial) - PREFIX_BYTES >= self._size(_PREFIX.unpack_from(partial))

    def _size(self, prefix: tuple[int, int]) -> int:
        compressed, size = prefix
        if compressed:
            raise StreamFailed(Code.CANCEL, "compressed messages are not taken", "UNIMPLEMENTED")
        if size > self._connection.message_bytes:
            raise StreamFailed(
                Code.CANCEL,
                f"a message of {size} bytes: {self._connection.message_bytes} are taken",
                "RESOURCE_EXHAUSTED",
            )
        return size

    def _messages(self, data: bytes, at: int, end: int = -1) -> int:
        """Hand on the whole messages there; where the rest begins."""
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
        """A message of so many bytes is done with: its room is free."""
        self._held -= nbytes + KEPT_BYTES
        self._grant()

    def _grant(self) -> None:
        """Tell the peer of room, when half of the window or more is free."""
        connection = self._connection
        # What is there of a message that is not whole is not in it: the rest of one larger than the window comes, too.
        free = connection.stream_window - self._window - self._held
        if free * 2 >= connection.stream_window and not self.remote_closed and not self.closed:
            self._window += free
            connection.write(window_update(self.stream_id, free))

    # -- its end

    def fail(self, error: StreamFailed) -> None:
        """Over for both sides: tell the receiver. The connection says it to the peer, if it must be said."""
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
