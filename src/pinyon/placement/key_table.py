"""A hash table of block keys in arrays: 13 bytes a slot, no object per key, and no pause when it grows.

A key is known by a fingerprint of 64 bits: one key in 10^12 looks like one of ten million others, and what is read from
here is a hint. A key may be in two buckets of eight slots (two-choice hashing, Azar et al. 1994). It is in the first
one while that has room, so most look-ups touch one cache line. Growth splits a few buckets at a time (linear hashing,
Litwin 1980) over arrays that are reserved at full size: memory that was never touched costs nothing.

Loops over unboxed numbers look keys up and store them: fast where compiled, some microseconds a key in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from librt.strings import read_i64_le
from librt.vecs import extend, vec
from mypy_extensions import i32, i64, u8
from numpy.typing import NDArray

from pinyon.core.block_keys import KEY_BYTES

SLOTS: Final = 8
"""Slots of a bucket."""
BUCKETS_MIN = 8
THERE: Final = -1
CROWDED: Final = -2
"""Results in place of a slot: the key is there already, or it has no room unless another one moves."""
_SPARE: Final = 3
"""The second bucket is taken where the first one has fewer free slots than this, and than the second."""
_GROWING = 4.8
"""Keys per bucket while the table grows: buckets that are split hold half of what the others do."""
_GROWN = 6.0
"""The maximum number of keys per bucket at the table's full size."""
_AHEAD = 512
"""Buckets that are split ahead of their time, in ~0.1 ms: few keys at a time need not grow the table each time."""
_RESERVED_BUCKETS_MAX = 1 << 24
"""The limit of buckets reserved at first. Beyond it (100 million keys) arrays are copied when they are full."""
_SMALL = 1 << 12
"""The number of buckets below which a table is small: it may grow by half at once."""
_SECOND = np.int64(32)
_LOW_HALF: Final = 0xFFFFFFFF
_LOW_31: Final = 0x7FFFFFFF
_FIRST: Final = 0x2545F491
_THEN: Final = 0x3B873593
_LAST: Final = 0x27D4EB2F
"""Odd numbers of 30 bits: 32 bits times one of them is no overflow, neither in Python nor compiled."""
_LINE: Final = 64

Advise = Callable[[int, int], None]
"""A function that is told of memory before it is used: its address, and how many bytes there are."""
Slots = NDArray[np.int64]
"""Numbers of slots, (n,)."""
Prints = NDArray[np.int64]
"""Fingerprints, (n,), never 0."""


def fingerprint(low: i64, high: i64) -> i64:
    """Returns the fingerprint of one key, given its halves; never 0. Keys are random already, but those of simulations
    and tests are small numbers. Rounds of a Feistel network spread them, and map no two numbers to the same one."""
    left, right = low >> 32, low & _LOW_HALF
    left ^= right * _FIRST >> 15 & _LOW_31
    left ^= high >> 32
    right ^= high & _LOW_HALF
    right ^= left * _THEN >> 29 & _LOW_HALF
    left ^= right * _LAST >> 15 & _LOW_31
    if left == 0 and right == 0:
        return 1
    return left << 32 | right


def read_prints(packed_keys: bytes, at: i64, prints: vec[i64]) -> i64:
    """Fills ``prints`` with the fingerprints of the keys from byte ``at`` on, while there is room. Returns how many."""
    size: i64 = len(packed_keys)
    room: i64 = len(prints)
    count: i64 = 0
    while at < size and count < room:
        prints[count] = fingerprint(read_i64_le(packed_keys, at), read_i64_le(packed_keys, at + 8))
        count += 1
        at += KEY_BYTES
    return count


class _Writable:
    """A column's numbers as NumPy may change them. It takes the buffer of a ``vec`` for read-only otherwise."""

    def __init__(self, memory: memoryview, start: i64, count: int) -> None:
        self._array = np.frombuffer(memory, memory.format)[start : start + count]

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Says where the numbers are. An array made from this keeps the column's memory."""
        return {**self._array.__array_interface__, "data": (_address(self._array), False)}


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class KeyTable:
    """Fingerprint → number of a holder set, and a stamp. A slot whose fingerprint is 0 is free.

    The table does not know what a slot stands for: callers that free slots keep the books."""

    def __init__(self, keys_max: int, push_out: Callable[[list[int]], None], advise: Advise | None = None) -> None:
        """Makes an empty table. ``push_out`` frees one of these slots, for a new key that has no other place."""
        self._push_out = push_out
        self._advise = advise
        self._most = max(BUCKETS_MIN, 1 << (int(keys_max / _GROWN)).bit_length())
        self._reserved = 0
        self.buckets, self._level = 0, BUCKETS_MIN
        self.keys = 0
        """Slots that are not free."""
        self.watched: list[int] | None = None
        """Slots that keys moved into; None while nobody wants to know."""
        self._touched: i64 = 0
        """The result of early reads, kept so that no compiler leaves them out."""
        # the columns begin with numbers that nobody reads, so that a bucket is in one line of the processor's cache
        self._prints, self._sets = vec[i64]([0] * _LINE), vec[i32]([0] * _LINE)
        self._stamps = vec[u8]([0] * _LINE)
        self._reserve(min(self._most, _RESERVED_BUCKETS_MAX) if keys_max < 1 << 27 else 1 << 12)
        self._first_print: i64 = -_address(np.frombuffer(memoryview(self._prints), np.int64)) % _LINE // 8
        self._first_set: i64 = -_address(np.frombuffer(memoryview(self._sets), np.int32)) % _LINE // 4
        self._append(BUCKETS_MIN)
        self.buckets = BUCKETS_MIN

    @property
    def slots(self) -> int:
        return self.buckets * SLOTS

    # -- look-ups

    def find(self, prints: vec[i64], count: i64, slots: vec[i64], numbers: vec[i64]) -> None:
        """Finds the slots of the first ``count`` fingerprints, and the numbers of the sets there; -1 and 0 for an
        absent one. Each pass reads for all keys what the next one needs: such reads overlap, while those of one search
        after the other wait."""
        table, start, sets, sets_start = self._prints, self._first_print, self._sets, self._first_set
        buckets: i64 = self.buckets
        level: i64 = self._level
        mask = 2 * level - 1
        touched: i64 = 0
        for each in range(count):
            bucket = prints[each] & mask
            if bucket >= buckets:
                bucket -= level
            first = SLOTS * bucket
            slots[each] = first
            touched ^= table[start + first] ^ i64(sets[sets_start + first])
        for each in range(count):
            print_ = prints[each]
            slot = _slot_in(table, start, slots[each], print_)
            slots[each] = slot
            if slot >= 0:
                numbers[each] = i64(sets[sets_start + slot])
            else:
                bucket = print_ >> 32 & mask
                if bucket >= buckets:
                    bucket -= level
                first = SLOTS * bucket
                numbers[each] = first
                touched ^= table[start + first]
        for each in range(count):
            if slots[each] < 0:
                slot = _slot_in(table, start, numbers[each], prints[each])
                slots[each], numbers[each] = slot, 0
                if slot >= 0:
                    numbers[each] = i64(sets[sets_start + slot])
        self._touched = touched

    def touch_stamps(self, slots: vec[i64], count: i64) -> None:
        """Reads the stamps of the first ``count`` slots (-1: none) early: the reads overlap, as in :meth:`find`."""
        stamps = self._stamps
        touched: i64 = 0
        for each in range(count):
            if slots[each] >= 0:
                touched ^= i64(stamps[slots[each]])
        self._touched = touched

    def set_at(self, slot: i64) -> i64:
        """Returns the number of a slot's set; 0 where the slot is free."""
        return i64(self._sets[self._first_set + slot])

    def stamp_at(self, slot: i64) -> i64:
        return i64(self._stamps[slot])

    def taken(self, start: int, end: int) -> Slots:
        """Returns the slots of a range that are not free."""
        found: Slots = np.flatnonzero(self.set_ids[start:end]) + start
        return found

    def print_of(self, slots: Slots) -> Prints:
        prints: Prints = self._print_array[slots]
        return prints

    # -- changes

    def insert(self, print_: i64, set_id: i64, stamp: i64) -> i64:
        """Stores a new key with its set and stamp; returns its slot. Returns :data:`THERE` if the key is there after
        all. Returns :data:`CROWDED` if there is no room: :meth:`make_room` must be called first."""
        table, start = self._prints, self._first_print
        buckets: i64 = self.buckets
        level: i64 = self._level
        mask = 2 * level - 1
        bucket = print_ & mask
        slot: i64 = CROWDED
        free: i64 = 0
        for _ in range(2):
            if bucket >= buckets:
                bucket -= level
            first = SLOTS * bucket
            end = first + SLOTS
            found: i64 = CROWDED
            free_here: i64 = 0
            for each in range(first, end):
                here = table[start + each]
                if here == 0:
                    if free_here == 0:
                        found = each
                    free_here += 1
                elif here == print_:
                    return THERE
            if free_here > free:
                slot, free = found, free_here
            if free >= _SPARE:  # a key that came just now would be here: there was no less room then
                break
            bucket = print_ >> 32 & mask
        if slot >= 0:
            table[start + slot] = print_
            self.change_set(slot, set_id)
            self.change_stamp(slot, stamp)
            self.keys += 1
        return slot

    def change_set(self, slot: i64, set_id: i64) -> None:
        sets = self._sets
        sets[self._first_set + slot] = i32(set_id)

    def change_stamp(self, slot: i64, stamp: i64) -> None:
        stamps = self._stamps
        stamps[slot] = u8(stamp)

    def remove(self, slot: i64) -> None:
        """Frees one slot that is taken."""
        table = self._prints
        table[self._first_print + slot] = 0
        self.change_set(slot, 0)
        self.keys -= 1

    def make_room(self, print_: int) -> None:
        """Makes room for a key whose buckets are full: one of the keys there moves to its other bucket. If that is full
        for all of them, a small table grows, and a large one loses a key: that is one in a million insertions."""
        while True:
            first, second = (self._bucket_of(half) * SLOTS for half in (print_, print_ >> 32))
            slots = [*range(first, first + SLOTS), *range(second, second + SLOTS)]
            if any(self._print_at(slot) == 0 or self._moves(slot) for slot in slots):
                return
            if self.buckets >= min(self._most, _SMALL):
                self._push_out(slots)
                return
            self.grow(self.buckets * SLOTS)

    def free(self, slots: Slots) -> None:
        """Frees slots that differ and are all taken."""
        self._print_array[slots] = 0
        self.set_ids[slots] = 0
        self.keys -= len(slots)

    def grow(self, keys: int) -> None:
        """Makes room for ``keys`` keys, as far as the limit goes, and for some that come next."""
        want = min(self._most, int(keys / _GROWING) + 1)
        if want > self.buckets:
            want = min(self._most, want + min(_AHEAD, self.buckets // 8))
        while self.buckets < want:
            if self.buckets == self._reserved:
                self._reserve(2 * self.buckets)
            self._split(min(want, self._reserved, 2 * self._level) - self.buckets)

    # -- inside

    def _bucket_of(self, value: int) -> int:
        bucket = value & (2 * self._level - 1)
        return bucket if bucket < self.buckets else bucket - self._level

    def _print_at(self, slot: i64) -> i64:
        return self._prints[self._first_print + slot]

    def _reserve(self, buckets: int) -> None:
        """Takes memory for so many buckets. It costs nothing until it is touched."""
        size = buckets * SLOTS + _LINE
        self._prints = vec[i64](memoryview(self._prints), capacity=size)
        self._sets = vec[i32](memoryview(self._sets), capacity=size)
        self._stamps = vec[u8](memoryview(self._stamps), capacity=size)
        self._reserved = buckets
        if self._advise is not None:
            for memory in (memoryview(self._prints), memoryview(self._sets), memoryview(self._stamps)):
                self._advise(_address(np.frombuffer(memory, np.uint8)), size * memory.itemsize)

    def _append(self, buckets: int) -> None:
        """Appends free buckets, for which memory is reserved."""
        free = np.zeros(buckets * SLOTS, np.int64)
        self._prints = extend(self._prints, free)
        self._sets = extend(self._sets, free.astype(np.int32))
        self._stamps = extend(self._stamps, free.astype(np.uint8))
        end = (self.buckets + buckets) * SLOTS
        self._print_array = np.asarray(_Writable(memoryview(self._prints), self._first_print, end))
        self.set_ids = np.asarray(_Writable(memoryview(self._sets), self._first_set, end))
        self.stamps = np.asarray(_Writable(memoryview(self._stamps), 0, end))

    def _split(self, count: int) -> None:
        """Splits the next ``count`` buckets: what belongs there moves to as many new ones at the end."""
        level, first, end = self._level, self.buckets - self._level, self.buckets
        self._append(count)
        old, new = slice(first * SLOTS, (first + count) * SLOTS), slice(end * SLOTS, (end + count) * SLOTS)
        prints = self._print_array[old]
        here = np.arange(first, first + count, dtype=np.int64).repeat(SLOTS)
        there = here + np.int64(level)
        wide, narrow = np.int64(2 * level - 1), np.int64(level - 1)
        # a key is here by its second hash if it cannot be by its first
        hashes = np.where(prints & narrow == here, prints, prints >> _SECOND)
        moves = (hashes & wide == there) & (prints != 0)
        for array in (self._print_array, self.set_ids, self.stamps):
            array[new] = np.where(moves, array[old], 0)
            array[old][moves] = 0
        self.buckets += count
        if self.buckets == 2 * level:
            self._level *= 2

    def _moves(self, slot: i64) -> bool:
        """Moves the key in this slot to its other bucket, if it can; returns whether it did."""
        table, start = self._prints, self._first_print
        print_ = table[start + slot]
        for half in (print_, print_ >> 32):
            first = self._bucket_of(half) * SLOTS
            for target in range(first, first + SLOTS):
                if table[start + target] == 0:
                    table[start + target] = print_
                    self.change_set(target, self.set_at(slot))
                    self.change_stamp(target, self.stamp_at(slot))
                    table[start + slot] = 0
                    self.change_set(slot, 0)
                    if self.watched is not None:
                        self.watched.append(target)
                    return True
        return False


def _slot_in(table: vec[i64], start: i64, first: i64, print_: i64) -> i64:
    """Returns the slot with this fingerprint in the bucket that begins with the slot ``first``; -1 if it is in none."""
    for slot in range(first, first + SLOTS):
        if table[start + slot] == print_:
            return slot
    return -1
