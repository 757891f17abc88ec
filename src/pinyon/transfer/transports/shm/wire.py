"""The shm transport's messages, without the I/O. Pure: bytes in, values out, :class:`WireError` for anything else.

The payload never travels here: the side whose memory is written copies it between the two processes' memories. After
the link's set-up (``links.handshake``) on a Unix socket (all integers big-endian)::

    - initiator → PROOF    magic code address                    where our mark of this link lies in our memory
    - server    → PROOF    magic code address
    - initiator → RESOLVE  header + count x key
    - server    → answer   header + count x place(code spans address seal + spans x (offset length))
    - initiator → WRITE    header + count x descriptor(key offset length) + count x address in the initiator's memory
    - server    → answer   header + count status bytes when code is SOME_REFUSED

A *seal* is 16 bytes at an address in its owner's memory. Nobody else can guess them or, for a link's mark, has them
there. Reading a seal together with other bytes of that process proves that it is still the same process. It also proves
that what the seal stands for (a link, or a key that opens something) still holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct, pack, unpack
from typing import NamedTuple, cast

from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.limits import MAX_FRAME_BYTES, MAX_FRAME_REQUESTS
from pinyon.transfer.types.request import Reason
from pinyon.transfer.types.segment import KEY_BYTES, Range
from pinyon.transfer.types.spans import MAX_SPANS, Spans

MAGIC = 0x5053
RESOLVE = 1
WRITE = 2
REPLY_BIT = 0x80
WRITE_DONE = WRITE | REPLY_BIT
SEAL_BYTES = 16

OK = 0
SOME_REFUSED = 1
UNREACHABLE = 2
"""The code of a PROOF whose sender cannot read the receiver's memory."""

_PROOF = Struct("!HHQ")
_HEAD = Struct("!HBBIQQ")
_PLACE = Struct("!BIQQ16s")
_SPAN = Struct("!QQ")
_DESCRIPTOR = Struct("!16sQQ")
_WRITE_OF_ONE = Struct("!HBBIQQ16sQQQ")

WRITE_OF_ONE_BYTES = _WRITE_OF_ONE.size
pack_head = _HEAD.pack
"""Arguments: ``(magic, kind, code, ranges, id, nbytes)``."""
pack_write_of_one = _WRITE_OF_ONE.pack
"""Arguments: a head and its only range, ``(*head, key, offset, length, address)``."""
unpack_write_of_one = _WRITE_OF_ONE.unpack_from
PROOF_BYTES = _PROOF.size
HEAD_BYTES = _HEAD.size
PLACE_BYTES = _PLACE.size
SPAN_BYTES = _SPAN.size
RANGE_BYTES = _DESCRIPTOR.size + 8
MAX_REQUEST_BYTES = HEAD_BYTES + MAX_FRAME_REQUESTS * RANGE_BYTES

PLACE_CODES = (0, Reason.UNKNOWN_REGION, Reason.ACCESS_DENIED, Reason.OTHER_TRANSPORT)
ADDRESS_SPACE = 1 << 63
"""User memory ends below this address on every machine."""


class Seal(NamedTuple):
    address: int
    value: bytes
    """The ``SEAL_BYTES`` bytes themselves."""


NO_SEAL = Seal(0, bytes(SEAL_BYTES))


class ShmRequestHead(NamedTuple):
    kind: int
    code: int
    ranges: int
    id: int
    nbytes: int
    """The bytes of a WRITE's ranges together; else 0."""

    @property
    def body_bytes(self) -> int:
        """The number of bytes that follow the head."""
        return self.ranges * (KEY_BYTES if self.kind == RESOLVE else RANGE_BYTES)


class ShmPlace(NamedTuple):
    """The place in the peer's memory of the bytes that a key opens, or why they may not be read."""

    code: int
    """Zero, or a ``Reason`` number."""
    address: int = 0
    """The address of the region's first byte."""
    seal: Seal = NO_SEAL
    """The seal that is intact as long as the key opens this."""
    spans: Spans = Spans((), ())


def pack_proof(code: int, address: int = 0) -> bytes:
    return _PROOF.pack(MAGIC, code, address)


def parse_proof(data: bytes) -> tuple[int, int]:
    """Parses a PROOF; returns its code, and the address of the sender's mark of the link (``links.handshake``).

    The mark is ``SEAL_BYTES`` long. Raises WireError if it is not a PROOF."""
    if len(data) != PROOF_BYTES:
        raise WireError(f"a PROOF has {PROOF_BYTES} bytes")
    magic, code, address = _PROOF.unpack(data)
    if magic != MAGIC or code not in (OK, UNREACHABLE):
        raise WireError("not a PROOF")
    return code, _checked(address, SEAL_BYTES)


def pack_resolve(message_id: int, keys: Sequence[bytes]) -> bytes:
    return b"".join([_HEAD.pack(MAGIC, RESOLVE, 0, len(keys), message_id, 0), *keys])


def pack_write(
    message_id: int, ranges: Iterable[tuple[bytes, int, int]], addresses: Sequence[int], nbytes: int
) -> bytes:
    """Packs a WRITE of ``ranges``, which are ``(key, offset, length)`` at the server.

    ``addresses`` say where the bytes of each range are here; the lengths add up to ``nbytes``."""
    count = len(addresses)
    encode = _DESCRIPTOR.pack
    parts = [_HEAD.pack(MAGIC, WRITE, 0, count, message_id, nbytes)]
    parts += [encode(key, offset, length) for key, offset, length in ranges]
    parts.append(pack(f"!{count}Q", *addresses))
    return b"".join(parts)


def parse_request(head: bytes | memoryview) -> ShmRequestHead:
    """Parses a request's head. Raises WireError for a bad magic or kind, or a count or size out of bounds."""
    if len(head) != HEAD_BYTES:
        raise WireError(f"a head has {HEAD_BYTES} bytes")
    magic, kind, code, ranges, message_id, nbytes = _HEAD.unpack(head)
    message = ShmRequestHead(kind, code, ranges, message_id, nbytes)
    if magic != MAGIC:
        raise WireError(f"bad magic {magic:#x}")
    if kind not in (RESOLVE, WRITE) or code:
        raise WireError(f"unknown request {kind} {code}")
    if not 0 < ranges <= MAX_FRAME_REQUESTS:
        raise WireError(f"{ranges} ranges in a request")
    if kind == RESOLVE:
        if nbytes:
            raise WireError("a RESOLVE with a payload")
    elif not ranges <= nbytes <= MAX_FRAME_BYTES:
        raise WireError(f"{nbytes} bytes in a WRITE of {ranges}")
    return message


def parse_keys(body: memoryview, message: ShmRequestHead) -> list[bytes]:
    """Parses the keys of a RESOLVE. Raises WireError if the size is wrong."""
    if len(body) != message.body_bytes:
        raise WireError("keys do not fill their space")
    data = bytes(body)
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def parse_ranges(body: memoryview, message: ShmRequestHead) -> tuple[list[Range], tuple[int, ...]]:
    """Parses the descriptors of a WRITE and the initiator's address of each.

    Raises WireError for a wrong size, a zero length, an address beyond the address space, or lengths that do not add
    up."""
    if len(body) != message.body_bytes:
        raise WireError("ranges do not fill their space")
    split = message.ranges * _DESCRIPTOR.size
    # Plain tuples with a descriptor's fields: a thousand named tuples cost as much as all the rest of this.
    ranges = cast("list[Range]", list(_DESCRIPTOR.iter_unpack(body[:split])))
    addresses = unpack(f"!{message.ranges}Q", body[split:])
    lengths = [length for _, _, length in ranges]
    total = sum(lengths)
    if total != message.nbytes:
        raise WireError(f"ranges add up to {total} bytes, the head says {message.nbytes}")
    if 0 in lengths:
        raise WireError("a range of no bytes")
    _checked(max(addresses), total)
    return ranges, addresses


def pack_places(request: ShmRequestHead, places: Iterable[ShmPlace]) -> bytes:
    """Packs the answer to a RESOLVE, whose places have at most ``MAX_SPANS`` spans together."""
    parts: list[bytes] = []
    for code, address, seal, (starts, ends) in places:
        parts.append(_PLACE.pack(code, len(starts), address, *seal))
        parts += [_SPAN.pack(start, end - start) for start, end in zip(starts, ends, strict=True)]
    body = b"".join(parts)
    return _HEAD.pack(MAGIC, RESOLVE | REPLY_BIT, OK, request.ranges, request.id, len(body)) + body


def pack_answer(request: ShmRequestHead, refusals: bytes | None) -> bytes:
    """Packs the answer to a WRITE. ``refusals``: one code per range, 0 = accepted; None if all were accepted."""
    code = OK if refusals is None else SOME_REFUSED
    head = _HEAD.pack(MAGIC, WRITE | REPLY_BIT, code, request.ranges, request.id, 0)
    return head if refusals is None else head + refusals


def parse_answer(head: bytes | memoryview, kind: int, count: int, message_id: int) -> tuple[int, int]:
    """Returns the code of an answer and how many bytes of body follow.

    The body is the places of a RESOLVE, with code ``OK``, or ``count`` codes of a WRITE with ``SOME_REFUSED``. Raises
    WireError if the answer is not to the request with these values."""
    if len(head) != HEAD_BYTES:
        raise WireError(f"a head has {HEAD_BYTES} bytes")
    magic, answered, code, ranges, answered_id, nbytes = _HEAD.unpack(head)
    if magic != MAGIC or answered != kind | REPLY_BIT or (ranges, answered_id) != (count, message_id):
        raise WireError("the answer is not to the request that was sent")
    if kind == RESOLVE and code == OK:
        if not count * PLACE_BYTES <= nbytes <= count * PLACE_BYTES + MAX_SPANS * SPAN_BYTES:
            raise WireError(f"{nbytes} bytes for {count} places")
        return OK, nbytes
    if kind != WRITE or code not in (OK, SOME_REFUSED) or nbytes:
        raise WireError(f"unknown answer code {code}, or {nbytes} bytes after it")
    return code, count if code == SOME_REFUSED else 0


def parse_places(data: bytes, count: int) -> list[ShmPlace]:
    """Parses the places in an answer.

    Raises WireError for a wrong size, an unknown code, spans that are empty or out of order, or a place outside the
    address space."""
    places: list[ShmPlace] = []
    at = 0
    for _ in range(count):
        if at + PLACE_BYTES > len(data):
            raise WireError("places do not fill their space")
        code, spans, address, seal_address, seal = _PLACE.unpack_from(data, at)
        at += PLACE_BYTES
        if code not in PLACE_CODES or bool(code) is bool(spans):
            raise WireError(f"refusal code {code} with {spans} spans")
        if at + spans * SPAN_BYTES > len(data):
            raise WireError("places do not fill their space")
        opened = _parse_spans(data[at : at + spans * SPAN_BYTES])
        at += spans * SPAN_BYTES
        if spans:
            _checked(address, opened.ends[-1])
        places.append(ShmPlace(code, _checked(address, 0), Seal(_checked(seal_address, SEAL_BYTES), seal), opened))
    if at != len(data):
        raise WireError("places do not fill their space")
    return places


def _parse_spans(data: bytes) -> Spans:
    """Parses spans. Raises WireError if they are empty or out of order."""
    pairs = list(_SPAN.iter_unpack(data))
    spans = Spans(tuple([start for start, _ in pairs]), tuple([start + length for start, length in pairs]))
    last = -1
    for start, end in zip(*spans, strict=True):
        if not last < start < end:
            raise WireError("spans are empty or out of order")
        last = end
    return spans


def _checked(address: int, length: int) -> int:
    if address + length > ADDRESS_SPACE:
        raise WireError("an address beyond the address space")
    return address


assert _DESCRIPTOR.size == KEY_BYTES + 16  # the struct formats above spell the sizes out
