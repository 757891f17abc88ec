"""Blocks that instances do not hold yet but will: those of the prompts that were placed there.

Mooncake §4.1 updates an instance's cache at placement. Only that instance counts on them: blocks that are not computed
cannot be fetched."""

from __future__ import annotations

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from pinyon.core.block_keys import KEY_BYTES
from pinyon.placement.holder_sets import HolderSets
from pinyon.placement.key_table import read_prints
from pinyon.placement.prefix_match import Holder

_PLACES_MIN: Final = 1024
_AGAIN: Final = 1 << 20
"""A flag beside a set's number: an instance in the set may have several prompts with the key. Nearly all keys lack it,
and need no look-up in :attr:`ExpectedBlocks._again`."""
_NUMBER: Final = _AGAIN - 1
"""The bits of a set's number: there are no more than 2^19 sets, and one of each row."""
_LOW: Final = 2 * _AGAIN - 1
_PRINT: Final = ~_LOW
"""The bits that are kept of a fingerprint: of a million keys, two look alike in one case of twenty."""


class ExpectedBlocks:
    """The keys of prompts on their way, packed and counted by instance, as prompts share them.

    They are in a hash table from fingerprint to the number of a set of instances, with open addressing; half of the
    places are free, at least. It does not shrink: 8 bytes a place. A key's place differs in each process, as with a
    dict of texts. Otherwise a client that chooses its keys could put them all in one place."""

    def __init__(self) -> None:
        self._secret: i64 = hash("a place in the table") | 1
        self._use(_PLACES_MIN)
        self._keys: i64 = 0
        self._touched: i64 = 0
        self._sets = HolderSets()
        self._again: dict[tuple[int, int], int] = {}
        """The number of further prompts with the key, by kept bits and row, where an instance has several. Keys that
        look alike are one key."""
        self.pairs = 0
        """Pairs of a key and an instance that expects it."""

    def __len__(self) -> int:
        """Returns the number of different keys."""
        return self._keys

    def has_some(self, prints: vec[i64], count: i64) -> bool:
        """Returns whether an instance expects one of the keys with the first ``count`` of these fingerprints."""
        cells, secret, shift, last = self._cells, self._secret, self._shift, self._last
        for each in range(count):
            kept = prints[each] & _PRINT
            at = kept * secret >> shift & last
            if cells[at] and cells[self._cell(kept)]:
                return True
        return False

    def mask_of(self, print_: i64) -> int:
        """Returns a mask of the instances that expect the key with this fingerprint; 0 if none does."""
        number = self._cells[self._cell(print_)] & _NUMBER
        if number == 0:
            return 0
        return self._sets.masks[number]

    def add(self, holder: Holder, packed_keys: bytes) -> None:
        """Adds the packed keys of one of the holder's prompts."""
        sets, row = self._sets, holder.bit.bit_length() - 1
        sets.drop_unused()
        self._make_room(len(packed_keys) // KEY_BYTES)
        alone: i64 = sets.alone(row)
        come: i64 = 0
        prints = _prints_of(packed_keys)
        self._touch(prints)
        cells = self._cells
        for print_ in prints:
            cell = self._cell(print_)
            if not cells[cell]:
                cells[cell] = print_ & _PRINT | alone
                come += 1
                continue
            number = cells[cell] & _NUMBER
            after = alone
            if number != alone:
                after = sets.extended(number, row)
            if after != number:
                cells[cell] += after - number
                sets.keys[number] -= 1
                sets.keys[after] += 1
                self.pairs += 1
            elif number == alone or sets.masks[number] >> row & 1:
                alike = print_ & _PRINT, row
                self._again[alike] = self._again.get(alike, 0) + 1
                cells[cell] |= _AGAIN
        self._keys += come
        self.pairs += come
        sets.keys[alone] += come

    def remove(self, holder: Holder, packed_keys: bytes) -> None:
        """Removes the packed keys of a prompt that were added."""
        sets, row = self._sets, holder.bit.bit_length() - 1
        alone: i64 = sets.alone(row)
        gone: i64 = 0
        prints = _prints_of(packed_keys)
        self._touch(prints)
        cells = self._cells
        for print_ in prints:
            cell = self._cell(print_)
            number = cells[cell] & _LOW
            if number == 0 or number & _AGAIN:
                if self._again and (more := self._again.pop((print_ & _PRINT, row), 0)):
                    if more > 1:
                        self._again[print_ & _PRINT, row] = more - 1
                    continue
                if number == 0:
                    continue
                number &= _NUMBER
            if number == alone:
                self._free(cell)
                gone += 1
                continue
            mask = sets.masks[number]
            if not mask >> row & 1:
                continue
            after: i64 = sets.reduced(number, row)
            sets.keys[number] -= 1
            if after:
                cells[cell] += after - number
                sets.keys[after] += 1
                self.pairs -= 1
            else:  # there are too many sets
                self._free(cell)
                self._keys -= 1
                self.pairs -= mask.bit_count()
        self._keys -= gone
        self.pairs -= gone
        sets.keys[alone] -= gone

    def _touch(self, prints: vec[i64]) -> None:
        """Reads the likely places of keys that are looked for next, so that the reads overlap."""
        cells, secret, shift, last = self._cells, self._secret, self._shift, self._last
        touched: i64 = 0
        for print_ in prints:
            touched ^= cells[(print_ & _PRINT) * secret >> shift & last]
        self._touched = touched

    def of(self, holder: Holder) -> int:
        """Returns how many keys the holder expects (looks at all: for tests)."""
        masks = (self._sets.masks[cell & _NUMBER] for cell in self._cells)
        return sum(1 for mask in masks if mask & holder.bit)

    def _use(self, places: i64) -> None:
        """Starts an empty table with so many places, a power of two."""
        self._cells: vec[i64] = vec[i64]([0] * places)
        """The kept bits of a fingerprint, and below them the number of its set, by place; 0 where the place is free."""
        self._last: i64 = places - 1
        self._shift: i64 = 64
        while places > 1:
            self._shift -= 1
            places >>= 1

    def _home(self, print_: i64) -> i64:
        """Returns the place that a fingerprint has if all places are free: the highest bits of a product on which all
        kept bits have an effect. The other bits do not count."""
        return ((print_ & _PRINT) * self._secret) >> self._shift & self._last

    def _cell(self, print_: i64) -> i64:
        """Returns the place where a fingerprint is, or would be."""
        cells, kept, last = self._cells, print_ & _PRINT, self._last
        at = kept * self._secret >> self._shift & last
        while cells[at] and cells[at] & _PRINT != kept:
            at = at + 1 & last
        return at

    def _free(self, cell: i64) -> None:
        """Frees a place; fingerprints behind it move back towards their homes."""
        cells, most = self._cells, self._last
        hole, at = cell, cell + 1 & most
        while cells[at]:
            # a fingerprint may not go before its home
            if (at - self._home(cells[at]) & most) >= (at - hole & most):
                cells[hole] = cells[at]
                hole = at
            at = at + 1 & most
        cells[hole] = 0

    def _make_room(self, keys: i64) -> None:
        """Grows the table so that it has room for ``keys`` more."""
        places = self._last + 1
        if 2 * (self._keys + keys) <= places:
            return
        before = self._cells
        while 2 * (self._keys + keys) > places:
            places *= 2
        self._use(places)
        for cell in before:
            if cell:
                self._cells[self._cell(cell)] = cell


def _prints_of(packed_keys: bytes) -> vec[i64]:
    prints = vec[i64]([0] * (len(packed_keys) // KEY_BYTES))
    read_prints(packed_keys, 0, prints)
    return prints
