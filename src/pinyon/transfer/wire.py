"""The TCP transport's bytes, without the I/O. Pure: bytes in, values out, :class:`WireError` for anything else.

Connection set-up (all integers big-endian)::

    initiator → HELLO   magic version flags connection_id replaces client_boot expected_boot nonce
    server    → REPLY   magic version code server_boot nonce mac        mac covers HELLO and REPLY, label "server"
    initiator → PROOF   mac                                             only with a secret; label "client"
    server    → ACCEPT  magic version code                              only with a secret

Then frames, one at a time per connection::

    initiator → header(magic opcode flags count frame_id payload) + count x descriptor(key offset length)
                + payload bytes (WRITE: the descriptors' ranges one after another)
    server    → header(magic opcode|0x80 code count frame_id payload) + count status bytes when code is SOME_REFUSED
                + payload bytes (READ: the accepted ranges one after another)

A refused descriptor costs its own request only: the server drains its WRITE payload, or leaves it out of a READ's.
Every count and length is checked against the bounds here before anything is allocated or received.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from pinyon.transfer.errors import WireError
from pinyon.transfer.segment import BOOT_ID_BYTES, KEY_BYTES

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_FRAME_REQUESTS",
    "VERSION",
    "Descriptor",
    "Frame",
    "Hello",
    "HelloCode",
    "HelloReply",
    "Reply",
]

MAGIC = b"PNYN"
FRAME_MAGIC = 0x504A
VERSION = 1
FLAG_AUTH = 1
NONCE_BYTES = 16
MAC_BYTES = 32
MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_REQUESTS = 1024
REPLY_BIT = 0x80
OPCODES = (1, 2)
ALL_OK = 0
SOME_REFUSED = 1
MAX_REFUSAL = 3
"""Largest per-request refusal code a peer may answer (``Reason`` 1 to 3)."""

_HELLO = Struct("!4sHHQQ16s16s16s")
_REPLY_BODY = Struct("!4sHH16s16s")
_ACCEPT = Struct("!4sHH")
_FRAME = Struct("!HBBIQQ")
_DESCRIPTOR = Struct("!16sQQ")

HELLO_BYTES = _HELLO.size
HELLO_REPLY_BYTES = _REPLY_BODY.size + MAC_BYTES
ACCEPT_BYTES = _ACCEPT.size
FRAME_HEADER_BYTES = _FRAME.size
DESCRIPTOR_BYTES = _DESCRIPTOR.size


class HelloCode(IntEnum):
    """The server's answer to a HELLO or a PROOF."""

    OK = 0
    VERSION = 1
    STALE = 2
    AUTH = 3
    BUSY = 4


class Hello(NamedTuple):
    connection_id: int
    """Unique per initiator process; 0 is not used."""
    replaces: int
    """A connection the server must have fully stopped before it answers (the fence of a retry); 0 for none."""
    client_boot: bytes
    expected_boot: bytes
    nonce: bytes
    authenticated: bool


class HelloReply(NamedTuple):
    code: HelloCode
    server_boot: bytes
    nonce: bytes
    mac: bytes


class Descriptor(NamedTuple):
    key: bytes
    offset: int
    length: int


class Frame(NamedTuple):
    opcode: int
    requests: int
    frame_id: int
    payload: int


class Reply(NamedTuple):
    all_ok: bool
    payload: int


# --- connection set-up ---


def pack_hello(hello: Hello) -> bytes:
    flags = FLAG_AUTH if hello.authenticated else 0
    return _HELLO.pack(
        MAGIC,
        VERSION,
        flags,
        hello.connection_id,
        hello.replaces,
        hello.client_boot,
        hello.expected_boot,
        hello.nonce,
    )


def parse_hello(data: bytes) -> tuple[int, Hello]:
    """``(version, hello)``; the caller answers an unknown version, so only the magic and the flags are checked.

    Raises:
        WireError: not a HELLO.
    """
    if len(data) != HELLO_BYTES:
        raise WireError(f"a HELLO has {HELLO_BYTES} bytes")
    magic, version, flags, connection_id, replaces, client, expected, nonce = _HELLO.unpack(data)
    if magic != MAGIC:
        raise WireError("not a pinyon transfer connection")
    if version == VERSION and flags & ~FLAG_AUTH:
        raise WireError(f"unknown HELLO flags {flags:#x}")
    if connection_id == 0:
        raise WireError("connection id 0")
    return version, Hello(connection_id, replaces, client, expected, nonce, bool(flags & FLAG_AUTH))


def pack_hello_reply(code: HelloCode, server_boot: bytes, nonce: bytes, hello: bytes, secret: bytes | None) -> bytes:
    """``hello`` is the HELLO as received. Without ``secret`` the mac is zero."""
    body = _REPLY_BODY.pack(MAGIC, VERSION, code, server_boot, nonce)
    return body + (server_mac(secret, hello, body) if secret is not None else bytes(MAC_BYTES))


def parse_hello_reply(data: bytes) -> HelloReply:
    """
    Raises:
        WireError: not a HELLO reply, or an unknown code.
    """
    if len(data) != HELLO_REPLY_BYTES:
        raise WireError(f"a HELLO reply has {HELLO_REPLY_BYTES} bytes")
    magic, version, code, boot, nonce = _REPLY_BODY.unpack_from(data)
    return HelloReply(_hello_code(magic, version, code), boot, nonce, data[_REPLY_BODY.size :])


def pack_accept(code: HelloCode) -> bytes:
    return _ACCEPT.pack(MAGIC, VERSION, code)


def parse_accept(data: bytes) -> HelloCode:
    """
    Raises:
        WireError: not an ACCEPT.
    """
    if len(data) != ACCEPT_BYTES:
        raise WireError(f"an ACCEPT has {ACCEPT_BYTES} bytes")
    return _hello_code(*_ACCEPT.unpack(data))


def _hello_code(magic: bytes, version: int, code: int) -> HelloCode:
    if magic != MAGIC:
        raise WireError("not a pinyon transfer connection")
    if version != VERSION:
        return HelloCode.VERSION
    try:
        return HelloCode(code)
    except ValueError:
        raise WireError(f"unknown HELLO code {code}") from None


def server_mac(secret: bytes, hello: bytes, reply_body: bytes) -> bytes:
    """Proves that the server knows the secret, for these two nonces only."""
    return hmac.new(secret, b"pinyon-transfer server" + hello + reply_body, hashlib.sha256).digest()


def client_mac(secret: bytes, hello: bytes, reply: bytes) -> bytes:
    """Proves that the initiator knows the secret. Its own label, so a server's mac cannot be played back."""
    return hmac.new(secret, b"pinyon-transfer client" + hello + reply, hashlib.sha256).digest()


def verify_server(secret: bytes, hello: bytes, reply: bytes) -> bool:
    expected = server_mac(secret, hello, reply[: _REPLY_BODY.size])
    return hmac.compare_digest(expected, reply[_REPLY_BODY.size :])


def verify_client(secret: bytes, hello: bytes, reply: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(client_mac(secret, hello, reply), proof)


# --- frames ---


def pack_frame(opcode: int, frame_id: int, ranges: Iterable[tuple[bytes, int, int]], count: int, payload: int) -> bytes:
    """Header and descriptors; ``ranges`` are ``count`` tuples ``(key, offset, length)`` adding up to ``payload``."""
    pack = _DESCRIPTOR.pack
    parts = [_FRAME.pack(FRAME_MAGIC, opcode, 0, count, frame_id, payload)]
    parts += [pack(key, offset, length) for key, offset, length in ranges]
    return b"".join(parts)


def parse_frame(data: bytes | bytearray | memoryview) -> Frame:
    """Parse a request header (the first ``FRAME_HEADER_BYTES`` of ``data``).

    Raises:
        WireError: bad magic, opcode, flags, or a count or payload beyond the protocol's bounds.
    """
    if len(data) < FRAME_HEADER_BYTES:
        raise WireError("short frame header")
    magic, opcode, flags, count, frame_id, payload = _FRAME.unpack_from(data)
    if magic != FRAME_MAGIC:
        raise WireError(f"bad frame magic {magic:#x}")
    if opcode not in OPCODES:
        raise WireError(f"unknown opcode {opcode}")
    if flags:
        raise WireError(f"unknown frame flags {flags:#x}")
    if not 0 < count <= MAX_FRAME_REQUESTS:
        raise WireError(f"{count} requests in a frame")
    if not count <= payload <= MAX_FRAME_BYTES:
        raise WireError(f"{payload} payload bytes in a frame of {count}")
    return Frame(opcode, count, frame_id, payload)


def parse_descriptors(data: memoryview, frame: Frame) -> list[Descriptor]:
    """Parse exactly ``frame.requests`` descriptors.

    Raises:
        WireError: wrong size, a zero length, or lengths that do not add up to the frame's payload.
    """
    if len(data) != frame.requests * DESCRIPTOR_BYTES:
        raise WireError("descriptors do not fill their space")
    ranges = [Descriptor._make(fields) for fields in _DESCRIPTOR.iter_unpack(data)]
    total = 0
    for entry in ranges:
        if not entry.length:
            raise WireError("a range of no bytes")
        total += entry.length
    if total != frame.payload:
        raise WireError(f"descriptors add up to {total} bytes, the header says {frame.payload}")
    return ranges


def pack_reply(frame: Frame, refusals: bytes | None, payload: int) -> bytes:
    """``refusals``: one code per request, 0 = accepted; None when all were accepted."""
    code = ALL_OK if refusals is None else SOME_REFUSED
    head = _FRAME.pack(FRAME_MAGIC, frame.opcode | REPLY_BIT, code, frame.requests, frame.frame_id, payload)
    return head if refusals is None else head + refusals


def parse_reply(data: bytes | bytearray | memoryview, opcode: int, count: int, frame_id: int, payload: int) -> Reply:
    """Parse the answer to the frame with these values; ``payload`` is what a READ asked for (0 for a WRITE).

    Raises:
        WireError: the answer is not to this frame, or its payload cannot be right.
    """
    if len(data) < FRAME_HEADER_BYTES:
        raise WireError("short reply header")
    magic, reply_opcode, code, reply_count, reply_id, reply_payload = _FRAME.unpack_from(data)
    if magic != FRAME_MAGIC or reply_opcode != opcode | REPLY_BIT or reply_count != count or reply_id != frame_id:
        raise WireError("the reply does not answer the frame that was sent")
    if code == ALL_OK and reply_payload == payload:
        return Reply(True, reply_payload)
    if code == SOME_REFUSED and reply_payload <= payload:
        return Reply(False, reply_payload)
    raise WireError(f"reply code {code} with {reply_payload} payload bytes, {payload} asked for")


def check_refusals(codes: bytes) -> None:
    """
    Raises:
        WireError: a code that no peer may answer, or none refused at all.
    """
    if max(codes) > MAX_REFUSAL:
        raise WireError(f"unknown refusal code {max(codes)}")
    if max(codes) == 0:
        raise WireError("a refusal that refuses nothing")


# The struct formats above spell these sizes out.
assert _DESCRIPTOR.size == KEY_BYTES + 16
assert BOOT_ID_BYTES == NONCE_BYTES
