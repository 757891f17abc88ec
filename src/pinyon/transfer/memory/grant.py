"""A grant: a key, and what peers that hold it may do with which bytes of a region, until when.

A region is memory; a grant opens some of it. A process gives thousands of them in a second (one per put, per lease of a
reader, per prefill), so one costs a key of 128 random bits and its ranges, and nothing that the kernel or a NIC must
know before a peer asks for it.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable

from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.types.segment import KEY_BYTES, RegionDescriptor
from pinyon.transfer.types.spans import Spans


class Grant:
    """Made by ``TransferEngine.grant``; treat it as read-only. Offsets that peers name are those of the region."""

    __slots__ = ("_holders", "access", "alive", "expires_s", "given", "key", "lent", "region", "rights", "spans")

    def __init__(
        self, region: Region, key: bytes | None, spans: Spans, access: Access, expires_s: float, *, given: bool
    ) -> None:
        """``given``: by ``TransferEngine.grant``; else it is the region's own key."""
        self.region = region
        self.key = secrets.token_bytes(KEY_BYTES) if key is None else key
        self.spans = spans
        self.access = access
        self.rights = int(access)
        """The same as a plain number: the bits of an enum are dear to look at."""
        self.expires_s = expires_s
        """By the engine's clock; infinity: never."""
        self.given = given
        self.alive = True
        """Not revoked."""
        self.lent = False
        """A NIC was told of it: to take that back is a system call per range."""
        self._holders: dict[object, Callable[[], None]] = {}

    def permits(self, right: int, start: int, end: int) -> bool:
        """May a peer do this with the bytes ``[start, end)``? ``right``: 1 to read, 2 to write."""
        if not self.rights & right:
            return False
        starts, ends = self.spans
        if len(starts) == 1:
            return starts[0] <= start and end <= ends[0]
        index = bisect_right(starts, start) - 1
        return index >= 0 and end <= ends[index]

    def descriptor(self) -> RegionDescriptor:
        """What a peer needs. The length is where the last range ends."""
        return RegionDescriptor(self.key, self.region.location, self.spans.ends[-1])

    def __repr__(self) -> str:
        # Without the key, as a region's.
        return f"Grant({len(self.spans.starts)} ranges, access={self.access.name}, alive={self.alive})"
