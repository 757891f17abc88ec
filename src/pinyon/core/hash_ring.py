"""Consistent hashing with virtual nodes (Karger et al. 1997; DualMap §3.4, SkyWalker §3.2)."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

import numpy as np
import xxhash
from librt.strings import read_i64_be, read_i64_le
from mypy_extensions import i64
from numpy.typing import NDArray

ABSENT_MAX = 16
"""The number of absent members that a ring keeps, in addition to as many as are in the pool."""
STEP = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Constants of SplitMix64 (Steele, Lea, Flood 2014)."""


class HashRing:
    """A circle of 2^64 with several points per member. A key belongs to the member of the next point clockwise.

    When a member joins or leaves, only the keys of its arcs change owner."""

    def __init__(self, members: Iterable[str], virtual_nodes: int, seed: int) -> None:
        """Builds the ring, which does not depend on the order of ``members``."""
        self._virtual_nodes, self._seed = virtual_nodes, seed
        self._numbers: dict[str, int] = {}
        """The number of each member, which represents the member at its points."""
        self._names: list[str] = []
        """Names by number, including some members that have left."""
        self._at: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._owners: NDArray[np.int64] = np.empty(0, np.int64)
        self._bytes: tuple[bytes, bytes] = b"", b""
        """The points and owners as bytes, which are read more quickly than arrays."""
        self.change(members, ())

    @property
    def members(self) -> Collection[str]:
        return self._numbers.keys()

    def change(self, new: Iterable[str], gone: Iterable[str]) -> None:
        """Adds and removes members. Only points of new members are computed, and inserted among the existing points."""
        lost = [self._numbers.pop(name) for name in gone]
        if lost:
            stay = ~np.isin(self._owners, lost)
            self._at, self._owners = self._at[stay], self._owners[stay]
        if names := sorted(new):
            self._insert(names)
        self._bytes = self._at.tobytes(), self._owners.tobytes()

    def _insert(self, names: list[str]) -> None:
        count = self._virtual_nodes
        at = _points(names, count, self._seed)
        self._number_anew()
        first = len(self._names)
        self._names += names
        self._numbers.update((name, first + place) for place, name in enumerate(names))
        owners = np.repeat(np.arange(first, first + len(names)), count)
        order = np.argsort(at)
        at, owners = at[order], owners[order]
        if len(self._at):
            places = self._at.searchsorted(at)
            at, owners = np.insert(self._at, places, at), np.insert(self._owners, places, owners)
        self._at, self._owners = at, owners
        for place in np.flatnonzero(self._at[1:] == self._at[:-1]).tolist():
            self._order_equal(place)

    def _number_anew(self) -> None:
        """Numbers the members anew when most numbers belong to members that have left."""
        if len(self._names) <= ABSENT_MAX + 2 * len(self._numbers):
            return
        number_of = np.zeros(len(self._names), np.int64)
        number_of[[*self._numbers.values()]] = np.arange(len(self._numbers))
        self._owners = number_of[self._owners]
        self._names = [*self._numbers]
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def _order_equal(self, place: int) -> None:
        """Orders by name the owners of points that are equal."""
        equal = slice(place, int(self._at.searchsorted(self._at[place], side="right")))
        self._owners[equal] = sorted(self._owners[equal].tolist(), key=self._names.__getitem__)

    def owner(self, key: bytes, other_than: str | None = None, among: Container[str] | None = None) -> str | None:
        """Returns the key's owner, or the next one clockwise other than ``other_than``; None if none.

        With ``among``, only these count as members."""
        digest, names = xxhash.xxh3_64_digest(key, self._seed), self._names
        points, numbers = self._bytes
        count = i64(len(points)) // 8
        place = lower_bound(points, read_i64_be(digest, 0))
        for _ in range(count):
            if place == count:
                place = 0
            name = names[read_i64_le(numbers, 8 * place)]
            if name != other_than and (among is None or name in among):
                return name
            place += 1
        return None


def lower_bound(points: bytes, wanted: i64) -> i64:
    """Returns the index of the first of these ordered unsigned numbers that is not less than ``wanted`` (same bits)."""
    least: i64 = -(1 << 63)  # with the highest bit flipped, unsigned numbers keep their order as signed ones
    low: i64 = 0
    high = i64(len(points)) // 8
    while low < high:
        middle = low + high >> 1
        if (read_i64_le(points, 8 * middle) ^ least) < (wanted ^ least):
            low = middle + 1
        else:
            high = middle
    return low


def _points(names: list[str], count: int, seed: int) -> NDArray[np.uint64]:
    """Returns ``count`` points per name: the first outputs of SplitMix64 from the digest of the name.

    Hashing each point would take a hundred times as long and would block all other work."""
    digests = np.fromiter((xxhash.xxh3_64_intdigest(name.encode(), seed) for name in names), np.uint64, len(names))
    at = digests[:, None] + STEP * np.arange(1, count + 1, dtype=np.uint64)
    at = (at ^ (at >> np.uint64(30))) * MIX_1
    at = (at ^ (at >> np.uint64(27))) * MIX_2
    points: NDArray[np.uint64] = (at ^ (at >> np.uint64(31))).ravel()
    return points
