"""Keys stored and removed one by one, which is fast where it is compiled. It comes to what
:mod:`pinyon.placement.holdings` comes to by operations on arrays; only where in the table a new key is may differ.

What is found is written at the end, or where the set changes, many slots at a time: compiled code reads memory as C
does, and writes it as Python does.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from librt.strings import read_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64
from numpy.typing import NDArray

from pinyon.core.block_keys import KEY_BYTES
from pinyon.placement.holder_sets import HolderSets
from pinyon.placement.key_ages import KeyAges
from pinyon.placement.key_table import CROWDED, THERE, KeyTable, Marks, fingerprint

__all__ = ["Stored", "as_array", "remove_in_loop", "store_in_loop"]

_TOGETHER: Final = 32
"""Keys whose buckets are brought from memory at the same time."""
_FEW_SLOTS: Final = 16
"""Are written one by one: an operation on arrays takes as long."""


class Stored:
    """What became of keys, up to the byte ``at``: ``new`` are the slots of those that are new, with their ``prints``,
    which are still to be put there. ``refused`` ones are not held, as there are too many sets."""

    __slots__ = ("at", "new", "prints", "refused")

    def __init__(self, at: int, new: vec[i64], prints: vec[i64], refused: int) -> None:
        self.at, self.new, self.prints, self.refused = at, new, prints, refused


def store_in_loop(table: KeyTable, sets: HolderSets, ages: KeyAges, row: int, packed_keys: bytes, at: i64) -> Stored:
    """From the byte ``at`` on, until the first one that has no room unless another one moves."""
    size: i64 = len(packed_keys)
    stamp: i64 = ages.stamp
    new, new_prints = vec[i64](), vec[i64]()
    marks = Marks((size - at) // KEY_BYTES)
    prints, slots, numbers = vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER)
    before: i64 = -1
    after: i64 = -1
    moved = vec[i64]()
    refused: i64 = 0
    refuses = crowded = False
    was: i64 = stamp
    old = vec[i64]()
    renewed: i64 = 0
    while at < size and not crowded:
        count = _read(packed_keys, at, prints)
        table.find_together(prints, count, slots, numbers)
        table.touch_stamps(slots, count)
        for each in range(count):
            slot = slots[each]
            if slot < 0:
                slot = table.place_in_loop(prints[each], marks)
                if slot == CROWDED:
                    crowded = True
                    count = each
                    break
                if slot != THERE:
                    new, new_prints = append(new, slot), append(new_prints, prints[each])
                continue
            if not marks.add(slot):  # it is named twice
                continue
            here = table.stamp_at(slot)
            if here != stamp:
                if here != was:
                    ages.renewed(was, renewed)
                    was, renewed = here, 0
                old = append(old, slot)
                renewed += 1
            number = numbers[each]
            if number != before:
                _moved(table, sets, row, before, after, moved, 1)
                before, moved = number, vec[i64]()
                after = sets.extended(number, row)
                refuses = after == number and not sets.masks[number] >> row & 1
            if after != number:
                moved = append(moved, slot)
            elif refuses:
                refused += 1
        at += count * KEY_BYTES
    _moved(table, sets, row, before, after, moved, 1)
    ages.renewed(was, renewed)
    _write(table.stamps, old, stamp)
    return Stored(at, new, new_prints, refused)


def remove_in_loop(table: KeyTable, sets: HolderSets, ages: KeyAges, row: int, packed_keys: bytes) -> vec[i64]:
    """The slots of those that nobody holds from now on, which are still to be freed."""
    size: i64 = len(packed_keys)
    at: i64 = 0
    gone = vec[i64]()
    marks = Marks(size // KEY_BYTES)
    prints, slots, numbers = vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER)
    before: i64 = -1
    after: i64 = -1
    moved = vec[i64]()
    last: i64 = 0
    was: i64 = 0
    gone_so: i64 = 0
    while at < size:
        count = _read(packed_keys, at, prints)
        table.find_together(prints, count, slots, numbers)
        table.touch_stamps(slots, count)
        for each in range(count):
            slot = slots[each]
            if slot < 0 or not marks.add(slot):  # it is not there, or is named twice
                continue
            number = numbers[each]
            if number != before:
                _left(table, sets, row, before, after, moved, last)
                before, moved, last = number, vec[i64](), 0
                after = sets.reduced(number, row)
            if after == 0:
                last += 1
                gone = append(gone, slot)
                here = table.stamp_at(slot)
                if here != was:
                    ages.gone(was, gone_so)
                    was, gone_so = here, 0
                gone_so += 1
            elif after != number:
                moved = append(moved, slot)
        at += count * KEY_BYTES
    _left(table, sets, row, before, after, moved, last)
    ages.gone(was, gone_so)
    return gone


def as_array(numbers: vec[i64]) -> NDArray[np.int64]:
    """The same, which are not none."""
    return np.frombuffer(memoryview(numbers), np.int64)


def _read(packed_keys: bytes, at: i64, prints: vec[i64]) -> i64:
    """The fingerprints of the keys from there on; how many."""
    size: i64 = len(packed_keys)
    count: i64 = 0
    while at < size and count < _TOGETHER:
        prints[count] = fingerprint(read_i64_le(packed_keys, at), read_i64_le(packed_keys, at + 8))
        count += 1
        at += KEY_BYTES
    return count


def _left(table: KeyTable, sets: HolderSets, row: int, before: i64, after: i64, slots: vec[i64], keys: i64) -> None:
    """These have another set; or so many have none: then nobody holds them any more."""
    if keys:
        sets.forget_alike(before, keys)
    else:
        _moved(table, sets, row, before, after, slots, -1)


def _moved(table: KeyTable, sets: HolderSets, row: int, before: i64, after: i64, slots: vec[i64], change: i64) -> None:
    """These have another set, which has this row, or has it no more."""
    keys = i64(len(slots))
    if keys:
        _write(table.set_ids, slots, after)
        sets.keys_one[before] -= keys
        sets.keys_one[after] += keys
        sets.held_one[row] += change * keys


def _write(column: NDArray[np.uint32] | NDArray[np.uint8], slots: vec[i64], number: i64) -> None:
    count = len(slots)
    if count > _FEW_SLOTS:
        column[as_array(slots)] = number
    elif count:
        one_by_one = column.data
        for slot in slots:
            one_by_one[slot] = number
