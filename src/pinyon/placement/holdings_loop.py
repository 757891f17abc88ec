"""Keys stored and removed one by one, which is fast where it is compiled. It comes to what
:mod:`pinyon.placement.holdings` comes to by operations on arrays; only where in the table a new key is may differ.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

from pinyon.core.block_keys import KEY_BYTES
from pinyon.placement.holder_sets import HolderSets
from pinyon.placement.key_ages import KeyAges
from pinyon.placement.key_table import CROWDED, THERE, KeyTable, fingerprint

__all__ = ["Stored", "remove_in_loop", "store_in_loop"]

_TOGETHER: Final = 16
"""Keys whose buckets are brought from memory at the same time."""


class Stored:
    """What became of keys, up to the byte ``at``: ``new`` are the slots of those that are new, whose sets and stamps
    are still to be written. ``refused`` ones are not held, as there are too many sets."""

    __slots__ = ("at", "new", "refused")

    def __init__(self, at: int, new: vec[i64], refused: int) -> None:
        self.at, self.new, self.refused = at, new, refused


def store_in_loop(table: KeyTable, sets: HolderSets, ages: KeyAges, row: int, packed_keys: bytes, at: i64) -> Stored:
    """From the byte ``at`` on, until the first one that has no room unless another one moves."""
    size: i64 = len(packed_keys)
    stamp: i64 = ages.stamp
    new = vec[i64]()
    prints, slots, numbers = vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER)
    before: i64 = -1
    after: i64 = -1
    moved: i64 = 0
    refused: i64 = 0
    refuses = False
    was: i64 = stamp
    renewed: i64 = 0
    while at < size:
        count = _read(packed_keys, at, prints)
        table.find_together(prints, count, slots, numbers)
        table.touch_stamps(slots, count)
        for each in range(count):
            slot = slots[each]
            if slot < 0:
                slot = table.place_in_loop(prints[each])
                if slot == CROWDED:
                    _moved(sets, row, before, after, moved, 1)
                    ages.renewed(was, renewed)
                    return Stored(at + each * KEY_BYTES, new, refused)
                if slot != THERE:
                    new = append(new, slot)
                continue
            number = table.set_at(slot)
            if number == 0:  # it came just now
                continue
            here = table.stamp_at(slot)
            if here != stamp:
                if here != was:
                    ages.renewed(was, renewed)
                    was, renewed = here, 0
                table.stamps_one[slot] = stamp
                renewed += 1
            if number != before:
                _moved(sets, row, before, after, moved, 1)
                before, moved = number, 0
                after = sets.extended(number, row)
                refuses = after == number and not sets.masks[number] >> row & 1
            if after != number:
                table.set_ids_one[slot] = after
                moved += 1
            elif refuses:
                refused += 1
        at += count * KEY_BYTES
    _moved(sets, row, before, after, moved, 1)
    ages.renewed(was, renewed)
    return Stored(size, new, refused)


def remove_in_loop(table: KeyTable, sets: HolderSets, ages: KeyAges, row: int, packed_keys: bytes) -> vec[i64]:
    """The slots of those that nobody holds from now on: they have no set any more, and are still to be freed."""
    size: i64 = len(packed_keys)
    at: i64 = 0
    gone = vec[i64]()
    prints, slots, numbers = vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER)
    before: i64 = -1
    after: i64 = -1
    moved: i64 = 0
    was: i64 = 0
    gone_so: i64 = 0
    while at < size:
        count = _read(packed_keys, at, prints)
        table.find_together(prints, count, slots, numbers)
        table.touch_stamps(slots, count)
        for each in range(count):
            slot = slots[each]
            if slot < 0:
                continue
            number = table.set_at(slot)
            if number == 0:  # it went just now
                continue
            if number != before:
                _left(sets, row, before, after, moved)
                before, moved = number, 0
                after = sets.reduced(number, row)
            if after != number:
                table.set_ids_one[slot] = after
                moved += 1
                if after == 0:
                    gone = append(gone, slot)
                    here = table.stamp_at(slot)
                    if here != was:
                        ages.gone(was, gone_so)
                        was, gone_so = here, 0
                    gone_so += 1
        at += count * KEY_BYTES
    _left(sets, row, before, after, moved)
    ages.gone(was, gone_so)
    return gone


def _left(sets: HolderSets, row: int, before: i64, after: i64, keys: i64) -> None:
    """So many keys have another set, or none: then nobody holds them any more."""
    if after:
        _moved(sets, row, before, after, keys, -1)
    elif keys:
        sets.forget_alike(before, keys)


def _read(packed_keys: bytes, at: i64, prints: vec[i64]) -> i64:
    """The fingerprints of the keys from there on; how many."""
    size: i64 = len(packed_keys)
    count: i64 = 0
    while at < size and count < _TOGETHER:
        prints[count] = fingerprint(read_i64_le(packed_keys, at), read_i64_le(packed_keys, at + 8))
        count += 1
        at += KEY_BYTES
    return count


def _moved(sets: HolderSets, row: int, before: i64, after: i64, keys: i64, change: i64) -> None:
    """So many keys have another set, which has this row, or has it no more."""
    if keys:
        sets.keys_one[before] -= keys
        sets.keys_one[after] += keys
        sets.held_one[row] += change * keys
