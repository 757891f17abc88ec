"""A grant: a key, and what peers that hold it may do with which bytes of a region, until when.

A region is memory; a grant opens some of it. A process gives thousands of grants in a second: one per put, per lease of
a reader, per prefill. So a grant costs a key of 128 random bits and its ranges, and nothing that the kernel or a NIC
must know before a peer asks for it."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable

from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.types.segment import KEY_BYTES, RegionDescriptor
from pinyon.transfer.types.spans import Spans


class Grant:
    """A grant, made by ``TransferEngine.grant``; treat it as read-only. Offsets that peers name are the region's."""

    __slots__ = ("_holders", "access", "alive", "expires_s", "given", "key", "lent", "region", "rights", "spans")

    def __init__(
        self, region: Region, key: bytes | None, spans: Spans, access: Access, expires_s: float, *, given: bool
    ) -> None:
        """Creates a grant that ``TransferEngine.grant`` has ``given``, or else one for the region's own key."""
        self.region = region
        self.key = secrets.token_bytes(KEY_BYTES) if key is None else key
        self.spans = spans
        self.access = access
        self.rights = int(access)
        """The access as a plain number: the bits of an enum are slow to read."""
        self.expires_s = expires_s
        """Expiry by the engine's clock; infinity means never."""
        self.given = given
        self.alive = True
        """True until the grant is revoked."""
        self.lent = False
        """True if a NIC was told of the grant: to take that back is a system call per range."""
        self._holders: dict[object, Callable[[], None]] = {}

    def permits(self, right: int, start: int, end: int) -> bool:
        """Returns whether a peer may read (``right`` 1) or write (2) the bytes ``[start, end)``."""
        if not self.rights & right:
            return False
        starts, ends = self.spans
        if len(starts) == 1:
            return starts[0] <= start and end <= ends[0]
        index = bisect_right(starts, start) - 1
        return index >= 0 and end <= ends[index]

    def descriptor(self) -> RegionDescriptor:
        """Returns what a peer needs; the length is where the last range ends."""
        return RegionDescriptor(self.key, self.region.location, self.spans.ends[-1])

    def __repr__(self) -> str:
        # The key must never be in a log.
        return f"Grant({len(self.spans.starts)} ranges, access={self.access.name}, alive={self.alive})"
