"""The objects of the store benchmark: memory in which every page of every object tells whose it is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.transfer_side import Memory

PAGE = 4096
_WORDS = PAGE // 8
_PAGES_MOST = 1 << 20
"""The pages of one object that a stamp can tell apart."""


class Item(NamedTuple):
    """One object of a call: its key as the store wants it, its number, and its place in the memory, in bytes."""

    key: Any
    number: int
    offset: int


def digest(number: int) -> bytes:
    """Returns the key of object ``number`` as 16 bytes."""
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest()


class ObjectMemory:
    """The memory that puts read (``source``), and the memory of the same size that gets write (``landing``).

    The source holds random bytes. The first word of each page is the object's number with the number of the page."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self.nbytes = nbytes
        self.source, self.landing = Memory(nbytes), Memory(nbytes)
        self._source, self._landing = (
            np.frombuffer(each.map, dtype=np.uint64).reshape(-1, _WORDS) for each in (self.source, self.landing)
        )
        self._source[:] = np.random.default_rng(seed).integers(0, 1 << 63, self._source.shape, np.uint64)

    def stamp(self, items: Sequence[Item], size: int) -> None:
        """Gives every page of these objects its stamp in the source, and clears their places in the landing."""
        for item in items:
            pages = self._pages(item, size)
            self._source[pages, 0] = self._stamps(item, size)
            self._landing[pages] = 0

    def wrong(self, items: Sequence[Item], size: int) -> int:
        """Returns how many of these objects do not lie complete in the landing."""
        count = 0
        for item in items:
            pages = self._pages(item, size)
            stamped = np.array_equal(self._landing[pages, 0], self._stamps(item, size))
            count += not (stamped and np.array_equal(self._landing[pages, 1:], self._source[pages, 1:]))
        return count

    @staticmethod
    def _pages(item: Item, size: int) -> slice:
        return slice(item.offset // PAGE, (item.offset + size) // PAGE)

    @staticmethod
    def _stamps(item: Item, size: int) -> Any:
        first = item.number * _PAGES_MOST
        return np.arange(first, first + size // PAGE, dtype=np.uint64)
