"""The control messages of the RDMA transport, without the I/O. Pure: bytes in, values out, or :class:`WireError`.

They pass on an authenticated link (``links.handshake``, service ``RDMA``) that lives as long as its queue pair;
the payload goes one-sided between the NICs instead. One request at a time (all integers big-endian)::

    - initiator → header(magic opcode code parts) + body       PAIR: HCA name, half; RESOLVE: count region keys
    - server    → header(magic opcode|0x80 code parts) + body   PAIR: half; RESOLVE: a part for each range of each key
    - initiator → header TOUCH                                  no answer: the queue pair is in use

A *half* is what one end of a reliable connection must know of the other (InfiniBand specification, 12.9: address, queue
pair number, first packet sequence number, path MTU, responder resources). A *grant* is where a region lies and the key
that the NIC checks. Every count, size and number is checked against its bounds here before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.limits import MAX_FRAME_REQUESTS
from pinyon.transfer.types.nic import MAX_NIC_CHARS
from pinyon.transfer.types.segment import KEY_BYTES, MAX_LENGTH
from pinyon.transfer.types.spans import MAX_SPANS, Spans

MAGIC = 0x5052
REPLY_BIT = 0x80
MAX_READS = 255
MAX_MESSAGE_BYTES = 1 << 31
"""The bytes of one work request at most (InfiniBand specification, 9.7.1)."""
MIN_MESSAGE_BYTES = 1 << 16
"""The least that a peer may announce: HCAs take megabytes, and one byte would mean a work request per byte."""
MAX_REFUSAL = 4
"""The largest code that a grant may carry (``Reason`` 1 to 4)."""
MAX_ACCESS = 3

_HEADER = Struct("!HBBI")
_NAME = Struct("!B255s")
_HALF = Struct("!16sHIIBBI")
_PART = Struct("!HBBIQQQ")
"""Fields: index of the key, code, access, the NIC's key, address, offset in the region, length."""

HEADER_BYTES = _HEADER.size
PAIR_BYTES = _NAME.size + _HALF.size
PAIRED_BYTES = _HALF.size


class RdmaOp(IntEnum):
    PAIR = 1
    RESOLVE = 2
    TOUCH = 3


class RdmaCode(IntEnum):
    """The server's answer to a request."""

    OK = 0
    NO_HCA = 1
    """The HCA is not one of the server's, or does not work at present."""
    NO_ROOM = 2
    """The NIC has no resources for another queue pair or memory registration."""


class RdmaHeader(NamedTuple):
    op: RdmaOp
    code: RdmaCode
    parts: int
    """The number of keys or grants; 1 for a half, 0 where there is no body."""


class Half(NamedTuple):
    """The data of one end of a reliable connection."""

    gid: bytes
    """The end's address, 16 bytes."""
    lid: int
    """InfiniBand's local address; 0 on Ethernet."""
    queue_pair: int
    """The queue pair's number, 24 bits; 0 and 1 are reserved."""
    first_packet: int
    """The packet sequence number that it will send first, 24 bits."""
    mtu: int
    """The path MTU as verbs number it: 1 = 256 bytes … 5 = 4096."""
    reads: int
    """The READs outstanding: the initiator's wish, or the server's grant."""
    max_message: int
    """The bytes that one work request may move."""


class RegionGrant(NamedTuple):
    """The place of the ranges that a key opens, for the NIC that was asked, or the ``Reason`` number why not."""

    code: int
    access: int = 0
    """The rights as in ``Access``; 0: not open to peers, and no other field is filled in."""
    spans: Spans = Spans((), ())
    keys: tuple[tuple[int, int], ...] = ()
    """The key that the NIC checks and the address of the first byte, per span."""


def pack_pair(hca: str, half: Half) -> bytes:
    name = hca.encode()
    return _HEADER.pack(MAGIC, RdmaOp.PAIR, 0, 1) + _NAME.pack(len(name), name) + _HALF.pack(*half)


def pack_paired(code: RdmaCode, half: Half | None) -> bytes:
    """Packs the answer to a PAIR, with a ``half`` exactly if the code is OK."""
    header = _HEADER.pack(MAGIC, RdmaOp.PAIR | REPLY_BIT, code, 0 if half is None else 1)
    return header if half is None else header + _HALF.pack(*half)


def pack_resolve(keys: Sequence[bytes]) -> bytes:
    """Packs a RESOLVE of at most ``MAX_FRAME_REQUESTS`` region keys."""
    return _HEADER.pack(MAGIC, RdmaOp.RESOLVE, 0, len(keys)) + b"".join(keys)


def pack_resolved(code: RdmaCode, grants: Sequence[RegionGrant]) -> bytes:
    """Packs one grant per key, in that order, with at most ``MAX_SPANS`` spans; none unless the code is OK."""
    parts: list[bytes] = []
    for index, (refusal, access, (starts, ends), keys) in enumerate(grants):
        parts += [
            _PART.pack(index, refusal, access, rkey, address, start, end - start)
            for start, end, (rkey, address) in zip(starts, ends, keys, strict=True)
        ] or [_PART.pack(index, refusal, access, 0, 0, 0, 0)]
    return _HEADER.pack(MAGIC, RdmaOp.RESOLVE | REPLY_BIT, code, len(parts)) + b"".join(parts)


def pack_touch() -> bytes:
    return _HEADER.pack(MAGIC, RdmaOp.TOUCH, 0, 0)


def parse_request(data: bytes | bytearray | memoryview) -> RdmaHeader:
    """Parses a request's header. Raises WireError if it is none, or has a count that the operation does not have."""
    opcode, code, count = _header(data)
    if code:
        raise WireError(f"a request with code {code}")
    try:
        op = RdmaOp(opcode)
    except ValueError:
        raise WireError(f"unknown operation {opcode}") from None
    least, most = {RdmaOp.PAIR: (1, 1), RdmaOp.RESOLVE: (1, MAX_FRAME_REQUESTS), RdmaOp.TOUCH: (0, 0)}[op]
    if not least <= count <= most:
        raise WireError(f"{op.name} with a count of {count}")
    return RdmaHeader(op, RdmaCode.OK, count)


def parse_reply(data: bytes | bytearray | memoryview, op: RdmaOp, count: int) -> RdmaHeader:
    """Parses the header of the answer to a request with this count; a body follows exactly if its code is OK.

    Raises WireError if it does not answer this request."""
    opcode, number, answered = _header(data)
    if opcode != op | REPLY_BIT:
        raise WireError(f"an answer {opcode:#x} to {op.name}")
    try:
        code = RdmaCode(number)
    except ValueError:
        raise WireError(f"unknown answer code {number}") from None
    most = 0 if code is not RdmaCode.OK else count + MAX_SPANS if op is RdmaOp.RESOLVE else count
    if not min(count, most) <= answered <= most:
        raise WireError(f"{answered} parts in the answer to {count}, with code {code.name}")
    return RdmaHeader(op, code, answered)


def _header(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header has {HEADER_BYTES} bytes")
    magic, opcode, code, count = _HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError(f"bad magic {magic:#x}")
    return opcode, code, count


def body_bytes(header: RdmaHeader, *, reply: bool) -> int:
    """Returns how many bytes follow a parsed header."""
    if header.op is RdmaOp.RESOLVE:
        return header.parts * (_PART.size if reply else KEY_BYTES)
    if header.op is RdmaOp.PAIR and header.parts:
        return PAIRED_BYTES if reply else PAIR_BYTES
    return 0


def parse_pair(data: bytes) -> tuple[str, Half]:
    """Parses HCA name and initiator's half. Raises WireError."""
    if len(data) != PAIR_BYTES:
        raise WireError(f"a PAIR has {PAIR_BYTES} bytes")
    length, name = _NAME.unpack_from(data)
    if not 0 < length <= len(name) or any(name[length:]):
        raise WireError("not the name of an HCA")
    try:
        hca = name[:length].decode()
    except UnicodeDecodeError:
        raise WireError("not the name of an HCA") from None
    if len(hca) > MAX_NIC_CHARS:
        raise WireError("not the name of an HCA")
    return hca, parse_half(data[_NAME.size :])


def parse_half(data: bytes) -> Half:
    """Parses a half. Raises WireError if a field is out of its bounds."""
    if len(data) != PAIRED_BYTES:
        raise WireError(f"a half has {PAIRED_BYTES} bytes")
    half = Half._make(_HALF.unpack(data))
    if not any(half.gid):
        raise WireError("no GID")
    if not 1 < half.queue_pair < 1 << 24:
        raise WireError(f"no queue pair {half.queue_pair:#x}")
    if half.first_packet >= 1 << 24:
        raise WireError(f"no packet number {half.first_packet:#x}")
    if not 1 <= half.mtu <= 5:
        raise WireError(f"no MTU {half.mtu}")
    if not 1 <= half.reads <= MAX_READS:
        raise WireError(f"{half.reads} READs outstanding")
    if not MIN_MESSAGE_BYTES <= half.max_message <= MAX_MESSAGE_BYTES:
        raise WireError(f"messages of {half.max_message} bytes")
    return half


def parse_keys(data: bytes) -> list[bytes]:
    """Parses region keys. Raises WireError unless it is a whole number of them."""
    if len(data) % KEY_BYTES or not data:
        raise WireError("not region keys")
    return [bytes(data[start : start + KEY_BYTES]) for start in range(0, len(data), KEY_BYTES)]


def parse_grants(data: bytes, count: int) -> list[RegionGrant]:
    """Parses what ``count`` keys open.

    Raises WireError if a field is out of its bounds, ranges are out of order or in a refusal, or a key has no
    answer."""
    if len(data) % _PART.size:
        raise WireError("not parts of grants")
    by_key: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
    last = 0
    for index, *fields in _PART.iter_unpack(data):
        if not last <= index < count:
            raise WireError(f"a part of key {index} after one of key {last}, of {count}")
        last = index
        by_key[index].append(tuple(fields))
    return [_grant(parts) for parts in by_key]


def _grant(parts: list[tuple[int, ...]]) -> RegionGrant:
    if not parts:
        raise WireError("a key without an answer")
    code, access = parts[0][:2]
    if code > MAX_REFUSAL or access > MAX_ACCESS:
        raise WireError(f"a grant with code {code} and access {access}")
    if code or not access:
        if len(parts) > 1 or any(parts[0][1:]):
            raise WireError("a refusal that grants something")
        return RegionGrant(code)
    starts: list[int] = []
    ends: list[int] = []
    keys: list[tuple[int, int]] = []
    last = -1
    for same_code, same_access, rkey, address, offset, length in parts:
        if (same_code, same_access) != (code, access) or not last < offset < offset + length <= MAX_LENGTH:
            raise WireError(f"a range of {length} bytes at {offset} after {last}")
        if address + length > 1 << 64:
            raise WireError(f"{length} bytes at {address:#x}")
        last = offset + length
        starts.append(offset)
        ends.append(last)
        keys.append((rkey, address))
    return RegionGrant(0, access, Spans(tuple(starts), tuple(ends)), tuple(keys))
