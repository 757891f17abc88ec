"""A frame's payload on its way between a stream and registered memory, with its checksum when it has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pinyon.transfer.links.stream import Stream
from pinyon.transfer.transports.tcp.wire import TRAILER_BYTES, Digest, checksum, pack_trailer, parse_trailer
from pinyon.transfer.types.errors import WireError

INBOX_BYTES: Final = 72 << 10
"""The bytes taken from a link at once when a header is expected.

Small frames come whole and are copied into place, which costs less than one more system call and what goes with it."""
HEAD_START_BYTES: Final = 16 << 10
"""The bytes taken at once where a large frame is expected, so few that copying them into place does not show."""
_PIECE_BYTES: Final = 256 << 10
"""The bytes hashed at a time: they are still in the core's cache after the kernel has copied them."""
_MAX_BUFFERS: Final = 1000
"""The buffers of one system call (the kernel takes 1024), with room for a header and a checksum."""


def _pieces(buffers: Sequence[memoryview], most: int = _MAX_BUFFERS) -> Iterator[list[memoryview]]:
    """Yields the buffers in order, in runs of at most ``_PIECE_BYTES`` and ``most`` buffers."""
    run: list[memoryview] = []
    room = _PIECE_BYTES
    for buffer in buffers:
        start, size = 0, len(buffer)
        while start < size:
            part = buffer[start : start + room] if start or size > room else buffer
            run.append(part)
            start += len(part)
            room -= len(part)
            if not room or len(run) == most:
                yield run
                run, room = [], _PIECE_BYTES
    if run:
        yield run


def send_payload(stream: Stream, head: bytes, buffers: Sequence[memoryview], seed: int | None, deadline: float) -> None:
    """Sends header and payload, and with a ``seed`` the payload's checksum. Raises what ``Stream.send`` raises."""
    if seed is None:
        stream.send([head, *buffers], deadline)
        return
    if sum(map(len, buffers)) <= _PIECE_BYTES:  # hashing first is quicker than a second system call
        stream.send([head, *buffers, pack_trailer(checksum(buffers, seed))], deadline)
        return
    digest = Digest(seed=seed)
    rest: list[bytes | memoryview] = [head]
    *pieces, last = _pieces(buffers)
    for piece in pieces:
        stream.send([*rest, *piece], deadline)
        rest = []
        for buffer in piece:  # while the receiver takes them in
            digest.update(buffer)
    for buffer in last:
        digest.update(buffer)
    stream.send([*rest, *last, pack_trailer(digest.intdigest())], deadline)


def receive_payload(
    stream: Stream,
    buffers: Sequence[memoryview],
    seed: int | None,
    deadline: float,
    early: memoryview,
    *,
    singly: bool = False,
) -> bool:
    """Fills the buffers. Returns False if their checksum, which is expected if a ``seed`` is given, is wrong.

    The bytes of the payload that came together with the header are ``early``. With ``singly``, the same memory stands
    several times among the buffers (a scratch that drains an unwanted payload), so each is hashed before the next is
    filled. Raises WireError if more came than belongs to the payload, and what ``Stream.receive`` raises."""
    if seed is None:
        if _fill(stream, buffers, early, deadline):
            raise WireError("bytes after the payload")
        return True
    nbytes = sum(map(len, buffers))
    if len(early) == nbytes + TRAILER_BYTES:  # all of it is here
        intact = checksum([early[:nbytes]], seed) == parse_trailer(early[nbytes:])
        _fill(stream, buffers, early[:nbytes], deadline)
        return intact
    trailer = memoryview(bytearray(TRAILER_BYTES))
    digest = Digest(seed=seed)
    *pieces, last = list(_pieces(buffers, 1 if singly else _MAX_BUFFERS)) or [[]]
    for piece in pieces:
        early = _fill(stream, piece, early, deadline)
        for buffer in piece:
            digest.update(buffer)
    if _fill(stream, [*last, trailer], early, deadline):  # one wait and one call for the end of the payload
        raise WireError("bytes after the payload")
    for buffer in last:
        digest.update(buffer)
    return digest.intdigest() == parse_trailer(trailer)


def _fill(stream: Stream, buffers: Sequence[memoryview], early: memoryview, deadline: float) -> memoryview:
    """Fills the buffers from the early bytes first. Returns the early bytes that are left."""
    have = len(early)
    if not have:
        stream.receive(buffers, deadline)
        return early
    at = 0
    for position, buffer in enumerate(buffers):
        size = len(buffer)
        if have - at < size:
            buffer[: have - at] = early[at:]
            stream.receive([buffer[have - at :], *buffers[position + 1 :]], deadline)
            return early[have:]
        buffer[:] = early[at : at + size]
        at += size
    return early[at:]
