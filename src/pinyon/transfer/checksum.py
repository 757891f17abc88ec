"""Checksums of a frame's payload, and when they are worth their time. Pure.

xxh3_64 tells a flipped bit, a lost or a doubled piece with certainty enough for storage and transport errors; it is no
protection against an attacker (that is TLS). It covers the payload and, through its seed, the request's header and
descriptors, so bytes of another range do not pass either.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64, xxh3_64_intdigest

from pinyon.transfer.errors import InvalidTransfer

__all__ = ["CHECKSUM_MODES", "ChecksumPolicy", "Digest", "checksum", "seed_of"]

CHECKSUM_MODES = ("auto", "on", "off")
MAX_COST = 0.05
"""``auto``: the share of a frame's time that its checksum may take."""
_CALL_S = 0.4e-6
"""One more buffer costs this much beside its bytes."""
_WEIGHT = 0.125
"""Of the newest frame in the running mean, as in TCP's smoothed round-trip time (RFC 6298)."""

Digest = xxh3_64
"""``Digest(seed=...)``, then ``update(buffer)`` piece by piece, then ``intdigest()``."""


def seed_of(head: bytes | bytearray | memoryview) -> int:
    """The seed that ties a payload to its request: header and descriptors as sent."""
    return xxh3_64_intdigest(head)


def checksum(buffers: Iterable[memoryview], seed: int) -> int:
    """Of the buffers one after another: 64 bits."""
    digest = Digest(seed=seed)
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


class ChecksumPolicy:
    """Decides per frame, for one connection, from what its frames have cost so far.

    A frame's time is taken as ``fixed + bytes / rate``, both learnt; a network card's rate leaves time for a checksum
    that loopback's does not.
    """

    __slots__ = ("_fixed_s", "_hash_s_byte", "_s_byte", "always", "auto")

    def __init__(self, mode: str, hash_bytes_s: float) -> None:
        """``hash_bytes_s``: measured speed of the checksum here.

        Raises:
            InvalidTransfer: no such mode.
        """
        if mode not in CHECKSUM_MODES:
            raise InvalidTransfer(f"checksum is one of {', '.join(CHECKSUM_MODES)}", field="checksum")
        self.auto = mode == "auto"
        """Decide by cost; ``observe`` is of use."""
        self.always = mode == "on"
        self._hash_s_byte = 1.0 / hash_bytes_s
        self._fixed_s = 40e-6
        self._s_byte = 0.2e-9

    def wanted(self, nbytes: int, buffers: int) -> bool:
        """Shall the frame of so many bytes in so many buffers carry a checksum?"""
        if not self.auto:
            return self.always
        cost_s = nbytes * self._hash_s_byte + buffers * _CALL_S
        return cost_s <= MAX_COST * (self._fixed_s + nbytes * self._s_byte)

    def observe(self, nbytes: int, seconds: float) -> None:
        """A frame of so many bytes took this long, its checksum included."""
        if nbytes <= 16 << 10:
            self._fixed_s += _WEIGHT * (min(seconds, 1.0) - self._fixed_s)
        elif nbytes >= 256 << 10:
            self._s_byte += _WEIGHT * (max(seconds - self._fixed_s, 0.0) / nbytes - self._s_byte)
