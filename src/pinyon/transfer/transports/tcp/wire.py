"""The TCP transport's bytes, without the I/O. Pure: bytes in, values out, :class:`WireError` for anything else.

After the connection set-up (``links.handshake``) come frames, one at a time per connection (all integers big-endian)::

    initiator → header(magic opcode flags count frame_id payload) + count x descriptor(key offset length)
                + payload bytes (WRITE: the descriptors' ranges one after another) + checksum (WRITE with flag CHECKSUM)
    server    → header(magic opcode|0x80 code count frame_id payload) + count status bytes when code is SOME_REFUSED
                + payload bytes (READ: the accepted ranges one after another) + checksum (READ with flag CHECKSUM)

A refused descriptor costs its own request only: the server drains its WRITE payload, or leaves it out of a READ's. The
checksum comes last, so that both sides can compute it while the payload passes. It is xxh3_64, which is enough against
errors of storage and transport and no protection against an attacker (that is TLS). Its seed covers the request's
header and descriptors, so that bytes of another range do not pass either. Every count and length is checked against the
bounds here before anything is allocated or received."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain as chained
from struct import Struct
from typing import Final, NamedTuple, cast

from xxhash import xxh3_64, xxh3_64_intdigest

from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.limits import MAX_FRAME_BYTES, MAX_FRAME_REQUESTS
from pinyon.transfer.types.segment import KEY_BYTES, Range

FRAME_MAGIC: Final = 0x504B
FLAG_CHECKSUM: Final = 1
REPLY_BIT: Final = 0x80
READ: Final = 1
WRITE: Final = 2
OPCODES: Final = (READ, WRITE)
READ_DONE: Final = READ | REPLY_BIT
WRITE_DONE: Final = WRITE | REPLY_BIT
ALL_OK: Final = 0
SOME_REFUSED: Final = 1
BAD_CHECKSUM: Final = 2
"""The payload of a WRITE that arrived is not the one that was sent."""
FAULT: Final = 3
"""The server could not read or write the memory (a device failed); any part of a WRITE may have been done."""
MAX_REFUSAL: Final = 4
"""Largest per-request refusal code a peer may answer (``Reason`` 1 to 4)."""

_FRAME: Final = Struct("!HBBIQQ")
_DESCRIPTOR: Final = Struct("!16sQQ")
_FRAME_OF_ONE: Final = Struct("!HBBIQQ16sQQ")
_TRAILER: Final = Struct("!Q")

FRAME_HEADER_BYTES: Final = _FRAME.size
CODE_AT: Final = 3
"""The offset of a reply's code in its header."""
DESCRIPTOR_BYTES: Final = _DESCRIPTOR.size
TRAILER_BYTES: Final = _TRAILER.size
FIRST_BYTES: Final = FRAME_HEADER_BYTES + DESCRIPTOR_BYTES
"""Every frame has at least one descriptor."""

pack_trailer: Final = _TRAILER.pack
"""A payload's checksum as bytes."""
pack_trailer_into: Final = _TRAILER.pack_into
pack_header: Final = _FRAME.pack
"""Arguments: ``(magic, opcode, flags or code, count, frame id, payload)``."""
pack_header_into: Final = _FRAME.pack_into
pack_frame_of_one: Final = _FRAME_OF_ONE.pack
"""Arguments: a header and its only descriptor, ``(*header, key, offset, length)``."""
pack_frame_of_one_into: Final = _FRAME_OF_ONE.pack_into
unpack_frame_of_one: Final = _FRAME_OF_ONE.unpack_from

Digest = xxh3_64
"""The incremental hash: ``Digest(seed=...)``, then ``update(buffer)`` piece by piece, then ``intdigest()``."""
seed_of: Final[Callable[[bytes | bytearray | memoryview], int]] = xxh3_64_intdigest
"""The seed that ties a payload to its request: the hash of header and descriptors as sent."""
checksum_of: Final[Callable[[bytes | memoryview, int], int]] = xxh3_64_intdigest
"""The 64-bit checksum of one buffer, with a seed."""


def checksum(buffers: Sequence[memoryview], seed: int) -> int:
    """Returns the 64-bit checksum of the buffers one after another."""
    if len(buffers) == 1:
        return xxh3_64_intdigest(buffers[0], seed)
    digest = Digest(seed=seed)
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


class Frame(NamedTuple):
    opcode: int
    requests: int
    frame_id: int
    payload: int
    checksum: bool = False
    """True if the payload is followed by its checksum, in whichever direction it goes."""


def pack_frame(frame: Frame, ranges: Iterable[tuple[bytes, int, int]]) -> bytes:
    """Packs a header and its descriptors; ``ranges`` are ``frame.requests`` times ``(key, offset, length)``."""
    opcode, count, frame_id, payload, checksum = frame
    flags = FLAG_CHECKSUM if checksum else 0
    head = _FRAME.pack(FRAME_MAGIC, opcode, flags, count, frame_id, payload)
    return head + _descriptors(count).pack(*chained.from_iterable(ranges))


@lru_cache(maxsize=MAX_FRAME_REQUESTS)
def _descriptors(count: int) -> Struct:
    return Struct("!" + "16sQQ" * count)


def parse_frame(data: bytes | bytearray | memoryview) -> Frame:
    """Parses a request header: the first ``FRAME_HEADER_BYTES`` of ``data``.

    Raises WireError for a bad magic, opcode or flags, or a count or payload beyond the protocol's bounds."""
    if len(data) < FRAME_HEADER_BYTES:
        raise WireError("short frame header")
    magic, opcode, flags, count, frame_id, payload = _FRAME.unpack_from(data)
    if magic != FRAME_MAGIC:
        raise WireError(f"bad frame magic {magic:#x}")
    if opcode not in OPCODES:
        raise WireError(f"unknown opcode {opcode}")
    if flags & ~FLAG_CHECKSUM:
        raise WireError(f"unknown frame flags {flags:#x}")
    if not 0 < count <= MAX_FRAME_REQUESTS:
        raise WireError(f"{count} requests in a frame")
    if not count <= payload <= MAX_FRAME_BYTES:
        raise WireError(f"{payload} payload bytes in a frame of {count}")
    return Frame(opcode, count, frame_id, payload, flags == FLAG_CHECKSUM)


def parse_descriptors(data: memoryview, frame: Frame) -> list[Range]:
    """Parses exactly ``frame.requests`` descriptors.

    Raises WireError for a wrong size, a zero length, or lengths that do not add up to the frame's payload."""
    if len(data) != frame.requests * DESCRIPTOR_BYTES:
        raise WireError("descriptors do not fill their space")
    # Plain tuples stand for Ranges: a thousand of them take a tenth of the time.
    ranges = cast("list[Range]", list(_DESCRIPTOR.iter_unpack(data)))
    total = 0
    for _, _, length in ranges:
        if not length:
            raise WireError("a range of no bytes")
        total += length
    if total != frame.payload:
        raise WireError(f"descriptors add up to {total} bytes, the header says {frame.payload}")
    return ranges


def pack_reply(frame: Frame, refusals: bytes | None, payload: int, *, code: int = ALL_OK) -> bytes:
    """Packs a reply up to its payload. ``refusals``: one code per request, 0 = accepted; None if all were accepted."""
    if refusals is not None:
        code = SOME_REFUSED
    head = _FRAME.pack(FRAME_MAGIC, frame.opcode | REPLY_BIT, code, frame.requests, frame.frame_id, payload)
    return head if refusals is None else head + refusals


def parse_reply(data: bytes | bytearray | memoryview, frame: Frame) -> tuple[int, int]:
    """Parses the answer to ``frame``: the first ``FRAME_HEADER_BYTES`` of ``data``; returns its code and payload size.

    Raises WireError if the answer is not to this frame, or its payload cannot be right."""
    if len(data) < FRAME_HEADER_BYTES:
        raise WireError("short reply header")
    magic, opcode, code, count, frame_id, payload = _FRAME.unpack_from(data)
    if (magic, opcode, count, frame_id) != (FRAME_MAGIC, frame[0] | REPLY_BIT, frame[1], frame[2]):
        raise WireError("the reply does not answer the frame that was sent")
    expected = 0 if frame.opcode == WRITE else frame.payload
    if (
        (code == ALL_OK and payload == expected)
        or (code == SOME_REFUSED and payload <= expected)
        or (code == BAD_CHECKSUM and not payload and frame.checksum and frame.opcode == WRITE)
        or (code == FAULT and not payload)
    ):
        return code, payload
    raise WireError(f"reply code {code} with {payload} payload bytes, {expected} asked for")


def check_refusals(codes: bytes) -> None:
    """Raises WireError if no peer may answer one of these codes, or if none is a refusal."""
    if max(codes) > MAX_REFUSAL:
        raise WireError(f"unknown refusal code {max(codes)}")
    if max(codes) == 0:
        raise WireError("a refusal that refuses nothing")


def parse_trailer(data: bytes | bytearray | memoryview) -> int:
    """Parses a checksum as sent; ``data`` has ``TRAILER_BYTES``."""
    (value,) = _TRAILER.unpack(data)
    return int(value)


assert _DESCRIPTOR.size == KEY_BYTES + 16  # the struct format above spells the sizes out
