"""Connection set-up, without the I/O: who the peer is, whether it knows the cluster secret, what it wants. Pure.

Every link between two processes (tcp data, shm, rdma control) begins with it (all integers big-endian)::

    1. initiator → HELLO   magic version flags service connection_id replaces client_boot expected_boot nonce
    2. server    → REPLY   magic version code server_boot nonce mac       mac covers HELLO and REPLY, label "server"
    3. initiator → PROOF   mac                                            only with a secret; label "client"
    4. server    → ACCEPT  magic version code                             only with a secret

The id ``replaces`` is the fence of a retry. Before the server answers OK it has ended the link with that id and all
that belongs to it, so nothing of the first attempt can follow the second. HELLO and REPLY have a fresh nonce of each
end. From both messages both ends work out the link's two *marks*, by which either can later show that it is an end of
this very link."""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.segment import BOOT_ID_BYTES

MAGIC = b"PNYN"
VERSION = 4
FLAG_AUTH = 1
NONCE_BYTES = 16
MAC_BYTES = 32
MARK_BYTES = 16

_HELLO = Struct("!4sHHHQQ16s16s16s")
_REPLY_BODY = Struct("!4sHH16s16s")
_ACCEPT = Struct("!4sHH")

HELLO_BYTES = _HELLO.size
HELLO_REPLY_BYTES = _REPLY_BODY.size + MAC_BYTES
ACCEPT_BYTES = _ACCEPT.size


class Service(IntEnum):
    """The protocol that the initiator wants to speak after the set-up."""

    TCP = 1
    """Frames with the payload inside (:mod:`pinyon.transfer.transports.tcp.wire`)."""
    SHM = 2
    """Requests for cross-memory copies, on a Unix socket."""
    RDMA = 3
    """Queue pair and region set-up; lives as long as the queue pair."""


class HelloCode(IntEnum):
    """The server's answer to a HELLO or a PROOF."""

    OK = 0
    VERSION = 1
    STALE = 2
    AUTH = 3
    BUSY = 4
    NO_SERVICE = 5


class Hello(NamedTuple):
    connection_id: int
    """An id that is unique per initiator process; 0 is not used."""
    replaces: int
    """A connection the server must have fully stopped before it answers (the fence of a retry); 0 for none."""
    client_boot: bytes
    expected_boot: bytes
    nonce: bytes
    authenticated: bool
    service: int = Service.TCP


class Marks(NamedTuple):
    """Values known to the ends of one link and of no other; no secret to those who saw the set-up pass."""

    initiator: bytes
    server: bytes


NO_MARKS = Marks(b"", b"")
"""The marks before the handshake."""


def marks(hello: bytes, reply: bytes) -> Marks:
    """Returns the marks of the link that was set up by these two messages."""
    whole = hashlib.sha256(b"pinyon-transfer marks" + hello + reply).digest()
    return Marks(whole[:MARK_BYTES], whole[MARK_BYTES:])


def pack_hello(hello: Hello) -> bytes:
    *who, authenticated, service = hello
    return _HELLO.pack(MAGIC, VERSION, FLAG_AUTH if authenticated else 0, service, *who)


def parse_hello(data: bytes) -> tuple[int, Hello]:
    """Parses a HELLO; returns ``(version, hello)``. Raises WireError if it is none.

    The caller answers an unknown version, so only the magic, the flags and the connection id are checked."""
    if len(data) != HELLO_BYTES:
        raise WireError(f"a HELLO has {HELLO_BYTES} bytes")
    magic, version, flags, service, connection_id, replaces, client, expected, nonce = _HELLO.unpack(data)
    if magic != MAGIC:
        raise WireError("not a pinyon transfer connection")
    if version == VERSION and flags & ~FLAG_AUTH:
        raise WireError(f"unknown HELLO flags {flags:#x}")
    if connection_id == 0:
        raise WireError("connection id 0")
    return version, Hello(connection_id, replaces, client, expected, nonce, bool(flags & FLAG_AUTH), service)


def pack_hello_reply(code: HelloCode, server_boot: bytes, nonce: bytes, hello: bytes, secret: bytes | None) -> bytes:
    """Packs the reply to ``hello``, the HELLO as received. Without ``secret`` the mac is zero."""
    body = _REPLY_BODY.pack(MAGIC, VERSION, code, server_boot, nonce)
    return body + (server_mac(secret, hello, body) if secret is not None else bytes(MAC_BYTES))


def parse_hello_reply(data: bytes) -> tuple[HelloCode, bytes]:
    """Parses a HELLO reply; returns its code and the server's boot id.

    Raises WireError if it is none, or has an unknown code."""
    if len(data) != HELLO_REPLY_BYTES:
        raise WireError(f"a HELLO reply has {HELLO_REPLY_BYTES} bytes")
    magic, version, code, boot, _ = _REPLY_BODY.unpack_from(data)
    return _hello_code(magic, version, code), boot


def pack_accept(code: HelloCode) -> bytes:
    return _ACCEPT.pack(MAGIC, VERSION, code)


def parse_accept(data: bytes) -> HelloCode:
    """Parses an ACCEPT; raises WireError if it is none."""
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
    """Returns the mac that proves that the server knows the secret, for these two nonces only."""
    return hmac.new(secret, b"pinyon-transfer server" + hello + reply_body, hashlib.sha256).digest()


def client_mac(secret: bytes, hello: bytes, reply: bytes) -> bytes:
    """Returns the initiator's proof of the secret, with its own label: a server's mac cannot be played back."""
    return hmac.new(secret, b"pinyon-transfer client" + hello + reply, hashlib.sha256).digest()


def verify_server(secret: bytes, hello: bytes, reply: bytes) -> bool:
    expected = server_mac(secret, hello, reply[: _REPLY_BODY.size])
    return hmac.compare_digest(expected, reply[_REPLY_BODY.size :])


def verify_client(secret: bytes, hello: bytes, reply: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(client_mac(secret, hello, reply), proof)


assert BOOT_ID_BYTES == NONCE_BYTES  # the struct formats above spell the sizes out
