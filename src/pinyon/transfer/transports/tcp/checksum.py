"""Checksums of a frame's payload, and when they are worth their time. Pure.

xxh3_64 tells a flipped bit, a lost or a doubled piece with certainty enough for storage and transport errors; it is no
protection against an attacker (that is TLS). It covers the payload and, through its seed, the request's header and
descriptors, so bytes of another range do not pass either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from pinyon.transfer.errors import InvalidTransfer

__all__ = ["CHECKSUM_MODES", "ChecksumPolicy", "Digest", "checksum", "seed_of"]

CHECKSUM_MODES = ("auto", "on", "off")
MAX_COST = 0.05
"""``auto``: the share of a frame's time that its checksum may take."""
_WINDOW = 16
"""Times of which the best counts; the window before it counts too, until the next is full."""
_FIRST_FRAMES = 16
"""Of a kind: with and without in turn."""
_TRY_WITHOUT_EVERY = 256
_TRY_WITH_EVERY = 64
_WATCH_EVERY = 8

Digest = xxh3_64
"""``Digest(seed=...)``, then ``update(buffer)`` piece by piece, then ``intdigest()``."""


def seed_of(head: bytes | bytearray | memoryview) -> int:
    """The seed that ties a payload to its request: header and descriptors as sent."""
    return xxh3_64_intdigest(head)


def checksum(buffers: Sequence[memoryview], seed: int) -> int:
    """Of the buffers one after another: 64 bits."""
    if len(buffers) == 1:
        return xxh3_64_intdigest(buffers[0], seed)
    digest = Digest(seed=seed)
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


class _Best:
    """The best of the last ``_WINDOW`` to twice as many times."""

    __slots__ = ("_before_s", "_count", "_now_s", "seconds")

    def __init__(self) -> None:
        self._before_s = self._now_s = math.inf
        self._count = 0
        self.seconds = math.inf

    def add(self, seconds: float) -> None:
        self._now_s = min(self._now_s, seconds)
        self.seconds = min(self._now_s, self._before_s)
        self._count += 1
        if self._count == _WINDOW:
            self._before_s, self._now_s, self._count = self._now_s, math.inf, 0


class _Cost:
    """What frames of one kind take."""

    __slots__ = ("turn", "with_it", "without")

    def __init__(self) -> None:
        self.turn = 0
        self.with_it = _Best()
        self.without = _Best()


class ChecksumPolicy:
    """Decides per frame, for one connection, from what its frames take with a checksum and without.

    Frames are of one kind when their bytes and their buffers are alike within a factor of two. The best recent times
    are compared: they show the cost, where means show who else used the machine.
    """

    __slots__ = ("_always", "_auto", "_costs", "watch")

    def __init__(self, mode: str) -> None:
        """
        Raises:
            InvalidTransfer: no such mode.
        """
        if mode not in CHECKSUM_MODES:
            raise InvalidTransfer(f"checksum is one of {', '.join(CHECKSUM_MODES)}", field="checksum")
        self._auto = mode == "auto"
        self._always = mode == "on"
        self._costs: dict[tuple[int, int], _Cost] = {}
        self.watch = False
        """After ``wanted``: ``observe`` that frame."""

    def wanted(self, nbytes: int, buffers: int) -> bool:
        """Shall the frame of so many bytes in so many buffers carry a checksum?"""
        if not self._auto:
            return self._always
        cost = self._cost(nbytes, buffers)
        cost.turn = turn = cost.turn + 1
        wanted = cost.with_it.seconds <= (1 + MAX_COST) * cost.without.seconds
        if turn <= _FIRST_FRAMES:
            self.watch = True
            return turn % 2 == 1
        if not turn % (_TRY_WITHOUT_EVERY if wanted else _TRY_WITH_EVERY):
            self.watch = True
            return not wanted
        self.watch = not turn % _WATCH_EVERY
        return wanted

    def observe(self, nbytes: int, buffers: int, with_checksum: bool, seconds: float) -> None:
        """Such a frame took this long."""
        cost = self._cost(nbytes, buffers)
        (cost.with_it if with_checksum else cost.without).add(seconds)

    def _cost(self, nbytes: int, buffers: int) -> _Cost:
        kind = (nbytes.bit_length(), buffers.bit_length())
        cost = self._costs.get(kind)
        if cost is None:
            cost = self._costs[kind] = _Cost()
        return cost
