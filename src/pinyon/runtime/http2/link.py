"""What a connection's streams share of it: room, limits, and the way to the peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pinyon.runtime.http2.wire import DEFAULT_FRAME, DEFAULT_WINDOW

__all__ = ["Ended", "Link"]


class Ended(Protocol):
    """A stream, as far as its connection's list of open ones goes."""

    @property
    def stream_id(self) -> int: ...


class Link:
    def __init__(self, write: Callable[[bytes], None], message_bytes: int, stream_window: int) -> None:
        self.write = write
        """Sends bytes to the peer."""
        self.message_bytes = message_bytes
        """Of a message that is taken, at most."""
        self.stream_window = stream_window
        """Bytes of a stream that may be under way to us."""
        self.send_window = DEFAULT_WINDOW
        """Bytes that the peer has room for, of all streams together."""
        self.send_frame = DEFAULT_FRAME
        """Bytes of a frame that it takes."""

    def forget(self, stream: Ended) -> None:
        """It is over."""
        raise NotImplementedError
