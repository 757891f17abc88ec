"""What the first bytes of a connection say: whether this implementation's client speaks, or somebody else.

Plain, it is a setting that nobody else sends; with TLS, a name of a protocol in the first message of its handshake
(RFC 8446 4.1.2, RFC 7301). Nothing is taken from the connection for that.
"""

from __future__ import annotations

from enum import Enum, auto

from pinyon.runtime.http2.wire import FRAME_HEAD, HEAD_BYTES, OURS, PREFACE, SETTINGS

__all__ = ["ALPN", "LOOK_BYTES", "Speaker", "who_speaks", "who_speaks_tls"]

ALPN = "pinyon-h2"
"""How TLS clients of this kind are known before they have said anything; servers that do not know it take ``h2``."""
LOOK_BYTES = 5 + (16 << 10)
"""As many as a first record of TLS may have."""
_SETTINGS_BYTES = 240


class Speaker(Enum):
    OURS = auto()
    OTHER = auto()
    UNKNOWN = auto()
    """More must come."""


def who_speaks(data: bytes) -> Speaker:
    """``data`` is what has come so far, from the first byte on."""
    if not PREFACE.startswith(data[: len(PREFACE)]):
        return Speaker.OTHER
    at = len(PREFACE)
    if len(data) < at + HEAD_BYTES:
        return Speaker.UNKNOWN
    high, low, kind, _, _ = FRAME_HEAD.unpack_from(data, at)
    size = (high << 8) | low
    if kind != SETTINGS or size > _SETTINGS_BYTES:
        return Speaker.OTHER
    at += HEAD_BYTES
    if len(data) < at + size:
        return Speaker.UNKNOWN
    names = {int.from_bytes(data[each : each + 2], "big") for each in range(at, at + size, 6)}
    return Speaker.OURS if OURS in names else Speaker.OTHER


def who_speaks_tls(data: bytes, protocol: bytes) -> Speaker:
    """The same of a connection with TLS: whether its client offers ``protocol``."""
    if data[:1] != b"\x16":
        return Speaker.OTHER if data else Speaker.UNKNOWN
    if len(data) < 5:
        return Speaker.UNKNOWN
    size = int.from_bytes(data[3:5], "big")
    if 5 + size > LOOK_BYTES:
        return Speaker.OTHER
    if len(data) < 5 + size:
        return Speaker.UNKNOWN
    try:
        return Speaker.OURS if protocol in _protocols(data[5 : 5 + size]) else Speaker.OTHER
    except IndexError:  # not what it says it is: the handshake will tell
        return Speaker.OTHER


def _protocols(message: bytes) -> list[bytes]:
    """Of a ClientHello. Raises :class:`IndexError` for what is none, or goes on in another record."""
    if message[0] != 1:
        return []
    at = 4 + 2 + 32
    at += 1 + message[at]  # session
    at += 2 + _number(message, at)  # cipher suites
    at += 1 + message[at]  # compression
    end = at + 2 + _number(message, at)
    at += 2
    while at + 4 <= end:
        kind, size = _number(message, at), _number(message, at + 2)
        at += 4
        if kind == 16:
            return _names(message[at + 2 : at + size])
        at += size
    return []


def _names(listed: bytes) -> list[bytes]:
    names, at = [], 0
    while at < len(listed):
        names.append(listed[at + 1 : at + 1 + listed[at]])
        at += 1 + listed[at]
    return names


def _number(data: bytes, at: int) -> int:
    return (data[at] << 8) | data[at + 1]
