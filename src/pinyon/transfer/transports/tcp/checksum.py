"""Checksums of a frame's payload. Pure.

xxh3_64 tells a flipped bit, a lost or a doubled piece with certainty enough for storage and transport errors; it is no
protection against an attacker (that is TLS). It covers the payload and, through its seed, the request's header and
descriptors, so bytes of another range do not pass either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

Digest = xxh3_64
"""``Digest(seed=...)``, then ``update(buffer)`` piece by piece, then ``intdigest()``."""


seed_of: Final[Callable[[bytes | bytearray | memoryview], int]] = xxh3_64_intdigest
"""The seed that ties a payload to its request: of header and descriptors as sent."""
checksum_of: Final[Callable[[bytes | memoryview, int], int]] = xxh3_64_intdigest
"""Of one buffer, with a seed: 64 bits."""


def checksum(buffers: Sequence[memoryview], seed: int) -> int:
    """Of the buffers one after another: 64 bits."""
    if len(buffers) == 1:
        return xxh3_64_intdigest(buffers[0], seed)
    digest = Digest(seed=seed)
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
