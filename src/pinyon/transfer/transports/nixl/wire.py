"""The control messages of the NIXL transport, without the I/O. Pure: bytes in, values out, or :class:`WireError`.

They pass on an authenticated link (``links.handshake``, service ``NIXL``); the payload goes by NIXL. One at a time (all
integers big-endian)::

    - initiator → PAIR     header + version of NIXL              only equal ones understand each other
    - server    → answer   header + page(address length seal) + metadata          or a code alone
    - initiator → READY    header                                connected: from now on the server does not help
    - server    → answer   header                                or BUSY: come again
    - initiator → PROVED   header                                it reads the page all the same; no answer
    - initiator → RESOLVE  header + count x key
    - server    → answer   header + count x place(code spans address length seal + spans + metadata)
    - initiator → TOUCH    header                                no answer: the link is in use

*Metadata* is what one NIXL agent must know of another: how to connect, and the keys of registered memory. It is opaque
but for its beginning, the name of the agent. A peer speaks for its own agent only, so NIXL does not get what it says of
another. A *seal* is 16 bytes in the page that stay as they are as long as what was told with them holds."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from pinyon.transfer.transports.shm.wire import (
    ADDRESS_SPACE,
    MAX_SPANS,
    NO_SEAL,
    PLACE_CODES,
    SEAL_BYTES,
    SPAN_BYTES,
    Seal,
    pack_spans,
    parse_spans,
)
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.segment import KEY_BYTES, MAX_LENGTH
from pinyon.transfer.types.spans import Spans

MAGIC = 0x504E
REPLY_BIT = 0x80
MAX_VERSION_BYTES = 64
MAX_METADATA_BYTES = 64 << 10
"""The metadata of one agent or region at most; with UCX on one NIC it is some hundred bytes."""
MAX_KEYS = 64
"""The keys of one RESOLVE at most."""
PROOF_S = 0.25
"""The seconds that the READs of a proof may take, in which the peer has no part."""

_HEADER = Struct("!HBBI")
_PAGE = Struct("!QQ16s")
_PLACE = Struct("!BIQQQ16sI")
_NAME_TAG = b"nixlSerDes|Agent"
"""The beginning of metadata in NIXL 1.x; the length of the name follows in 8 bytes, least significant first."""

HEADER_BYTES = _HEADER.size
MAX_PAIRED_BYTES = _PAGE.size + MAX_METADATA_BYTES
MAX_PLACES_BYTES = MAX_KEYS * (_PLACE.size + MAX_METADATA_BYTES) + MAX_SPANS * SPAN_BYTES


class NixlOp(IntEnum):
    PAIR = 1
    READY = 2
    PROVED = 3
    RESOLVE = 4
    TOUCH = 5


class NixlCode(IntEnum):
    """The server's answer to a request."""

    OK = 0
    OTHER_VERSION = 1
    BUSY = 2
    """The server takes part in another proof; send READY again."""


_REQUEST_COUNTS = {
    NixlOp.PAIR: (1, MAX_VERSION_BYTES),
    NixlOp.READY: (0, 0),
    NixlOp.PROVED: (0, 0),
    NixlOp.RESOLVE: (1, MAX_KEYS),
    NixlOp.TOUCH: (0, 0),
}
_ANSWER_BYTES = {NixlOp.PAIR: MAX_PAIRED_BYTES, NixlOp.READY: 0, NixlOp.RESOLVE: MAX_PLACES_BYTES}


class NixlHeader(NamedTuple):
    op: NixlOp
    code: NixlCode
    size: int
    """The number of keys of a RESOLVE; else the bytes that follow."""


class Page(NamedTuple):
    """The place of a peer's seals, and the first of them, which stands for the process."""

    address: int
    length: int
    seal: bytes


class NixlPlace(NamedTuple):
    """The place of the bytes that a key opens, or why they may not be read."""

    code: int
    """Zero, or a ``Reason`` number."""
    address: int = 0
    """The address of the region's first byte."""
    length: int = 0
    seal: Seal = NO_SEAL
    spans: Spans = Spans((), ())
    metadata: bytes = b""


def pack_request(op: NixlOp, body: bytes = b"") -> bytes:
    count = len(body) // KEY_BYTES if op is NixlOp.RESOLVE else len(body)
    return _HEADER.pack(MAGIC, op, 0, count) + body


def pack_answer(op: NixlOp, code: NixlCode, body: bytes = b"") -> bytes:
    return _HEADER.pack(MAGIC, op | REPLY_BIT, code, len(body)) + body


def pack_paired(page: Page, metadata: bytes) -> bytes:
    """Packs the body of the answer to PAIR."""
    return _PAGE.pack(*page) + metadata


def pack_places(places: Sequence[NixlPlace]) -> bytes:
    """Packs the body of the answer to RESOLVE: one place per key, with at most ``MAX_SPANS`` spans together."""
    parts: list[bytes] = []
    for code, address, length, seal, (starts, ends), metadata in places:
        parts.append(_PLACE.pack(code, len(starts), address, length, *seal, len(metadata)))
        parts += [pack_spans(starts, ends), metadata]
    return b"".join(parts)


def parse_request(data: bytes | bytearray | memoryview) -> NixlHeader:
    """Parses a request's header. Raises WireError if it is none, or has a count that it cannot have."""
    number, code, count = _header(data)
    try:
        op = NixlOp(number)
    except ValueError:
        raise WireError(f"unknown operation {number}") from None
    least, most = _REQUEST_COUNTS[op]
    if code or not least <= count <= most:
        raise WireError(f"{op.name} with code {code} and a count of {count}")
    return NixlHeader(op, NixlCode.OK, count)


def request_bytes(header: NixlHeader) -> int:
    """Returns how many bytes follow a request's header."""
    return header.size * KEY_BYTES if header.op is NixlOp.RESOLVE else header.size


def parse_answer(data: bytes | bytearray | memoryview, op: NixlOp) -> NixlHeader:
    """Parses the header of an answer; as many bytes as it counts follow, none unless its code is OK.

    Raises WireError if it does not answer this request."""
    number, found, count = _header(data)
    try:
        code = NixlCode(found)
    except ValueError:
        raise WireError(f"unknown answer code {found}") from None
    if number != op | REPLY_BIT or count > (_ANSWER_BYTES[op] if code is NixlCode.OK else 0):
        raise WireError(f"an answer {number:#x} of {count} bytes to {op.name}, with code {code.name}")
    return NixlHeader(op, code, count)


def _header(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header has {HEADER_BYTES} bytes")
    magic, number, code, count = _HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError(f"bad magic {magic:#x}")
    return number, code, count


def parse_keys(data: bytes) -> list[bytes]:
    """Parses keys. Raises WireError unless it is a whole number of them."""
    if len(data) % KEY_BYTES or not data:
        raise WireError("not region keys")
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


def parse_paired(data: bytes, agent: str) -> tuple[Page, bytes]:
    """Parses the peer's page, and the metadata of its agent, which has this name.

    Raises WireError if a field is out of its bounds, or the metadata is another agent's."""
    if len(data) < _PAGE.size:
        raise WireError("no page")
    page = Page(*_PAGE.unpack_from(data))
    if not 0 < page.address < ADDRESS_SPACE or not SEAL_BYTES <= page.length < ADDRESS_SPACE - page.address:
        raise WireError("a page out of its bounds")
    return page, _checked(data[_PAGE.size :], agent)


def parse_places(data: bytes, count: int, page: Page, agent: str) -> list[NixlPlace]:
    """Parses what ``count`` keys open.

    Raises WireError if a field is out of its bounds, bytes are missing or left, or the metadata is another agent's."""
    places: list[NixlPlace] = []
    at = 0
    for _ in range(count):
        if at + _PLACE.size > len(data):
            raise WireError("a place is missing")
        code, spans, address, length, seal_at, seal, nbytes = _PLACE.unpack_from(data, at)
        at += _PLACE.size
        rest = at + spans * SPAN_BYTES + nbytes
        if code not in PLACE_CODES or nbytes > MAX_METADATA_BYTES or rest > len(data):
            raise WireError(f"a place with code {code}, {spans} spans and {nbytes} bytes of metadata")
        if code:
            if spans or nbytes:
                raise WireError("a refusal that opens something")
            places.append(NixlPlace(code))
            continue
        if not spans or not 0 < address < ADDRESS_SPACE:
            raise WireError("a place out of its bounds")
        if not 0 < length <= MAX_LENGTH or length >= ADDRESS_SPACE - address:
            raise WireError("a region out of its bounds")
        if not page.address <= seal_at <= page.address + page.length - SEAL_BYTES:
            raise WireError("a seal outside the page")
        found = parse_spans(data[at : at + spans * SPAN_BYTES])
        if found.ends[-1] > length:
            raise WireError("spans out of the region")
        metadata = _checked(data[rest - nbytes : rest], agent)
        places.append(NixlPlace(0, address, length, Seal(seal_at, seal), found, metadata))
        at = rest
    if at != len(data):
        raise WireError("bytes after the places")
    return places


def _checked(metadata: bytes, agent: str) -> bytes:
    name = agent.encode()
    head = _NAME_TAG + len(name).to_bytes(8, "little") + name + b"|"
    if len(metadata) > MAX_METADATA_BYTES or not metadata.startswith(head):
        raise WireError("not the metadata of the peer's own agent")
    return metadata
