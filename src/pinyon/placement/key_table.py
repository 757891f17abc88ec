"""A hash table of block keys in arrays: 13 bytes a slot, no object per key, and no pause when it grows.

A key is known by a fingerprint of 64 bits: one key in 10^12 looks like one of ten million others, and what is read from
here is a hint. A key may be in two buckets of eight slots (two-choice hashing, Azar et al. 1994). It is in the first
one while that has room, so most look-ups touch one cache line. Growth splits a few buckets at a time (linear hashing,
Litwin 1980) over arrays that are reserved at full size: memory that was never touched costs nothing.

Loops over unboxed numbers look keys up and store them: fast where compiled, some microseconds a key in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i64
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
Number = TypeVar("Number", np.int64, np.uint32, np.uint8)


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


class _Memory:
    """Zeroed memory that arrays change, and that compiled loops read as bytes as fast as C does. It costs nothing until
    it is touched. Nobody else has these bytes, so nobody expects them to stay as they are."""

    def __init__(self, size: int, advise: Advise | None) -> None:
        self.read = bytes(size + _LINE + 8)
        self._address: int = np.frombuffer(self.read, np.uint8).__array_interface__["data"][0]
        self.start: i64 = -self._address % _LINE
        """The offset where a line of the processor's cache begins."""
        self._size = size
        if advise is not None:
            advise(self._address, size)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Bytes that may be written. An array made from them keeps this object."""
        return {"data": (self._address + self.start, False), "shape": (self._size,), "typestr": "|u1", "version": 3}

    def array(self, dtype: type[Number]) -> NDArray[Number]:
        """Returns all of the memory as an array."""
        return np.asarray(self).view(dtype)


class KeyTable:
    """Fingerprint → number of a holder set, and a stamp. A slot whose fingerprint is 0 is free.

    The table does not know what a slot stands for: callers that free slots keep the books.
    """

    def __init__(self, keys_max: int, push_out: Callable[[list[int]], None], advise: Advise | None = None) -> None:
        """Makes an empty table. ``push_out`` frees one of these slots, for a new key that has no other place."""
        self._push_out = push_out
        self._advise = advise
        self._most = max(BUCKETS_MIN, 1 << (int(keys_max / _GROWN)).bit_length())
        self._reserved = 0
        self.buckets = self._level = BUCKETS_MIN
        self.keys = 0
        """Slots that are not free."""
        self.watched: list[int] | None = None
        """Slots that keys moved into; None while nobody wants to know."""
        self._touched: i64 = 0
        """The result of early reads, kept so that no compiler leaves them out."""
        self._prints: NDArray[np.int64] = np.zeros((0, SLOTS), np.int64)
        self.set_ids: NDArray[np.uint32] = np.zeros(0, np.uint32)
        """The number of the set by slot; 0 where the slot is free."""
        self.stamps: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._reserve(min(self._most, _RESERVED_BUCKETS_MAX) if keys_max < 1 << 27 else 1 << 12)

    @property
    def slots(self) -> int:
        return self.buckets * SLOTS

    # -- look-ups

    def find(self, prints: vec[i64], count: i64, slots: vec[i64], numbers: vec[i64]) -> None:
        """Finds the slots of the first ``count`` fingerprints, and the numbers of the sets there; -1 and 0 for an
        absent one. Each pass reads for all keys what the next one needs: such reads overlap, while those of one search
        after the other wait."""
        memory, start = self._print_memory.read, self._print_memory.start
        sets, sets_start = self._set_memory.read, self._set_memory.start
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
            touched ^= read_i64_le(memory, start + 8 * first) ^ read_i64_le(sets, sets_start + 4 * first)
        for each in range(count):
            print_ = prints[each]
            slot = _slot_in(memory, start, slots[each], print_)
            slots[each] = slot
            if slot >= 0:
                numbers[each] = read_i64_le(sets, sets_start + 4 * slot) & _LOW_HALF
            else:
                bucket = print_ >> 32 & mask
                if bucket >= buckets:
                    bucket -= level
                first = SLOTS * bucket
                numbers[each] = first
                touched ^= read_i64_le(memory, start + 8 * first)
        for each in range(count):
            if slots[each] < 0:
                slot = _slot_in(memory, start, numbers[each], prints[each])
                slots[each], numbers[each] = slot, 0
                if slot >= 0:
                    numbers[each] = read_i64_le(sets, sets_start + 4 * slot) & _LOW_HALF
        self._touched = touched

    def touch_stamps(self, slots: vec[i64], count: i64) -> None:
        """Reads the stamps of the first ``count`` slots (-1: none) early: the reads overlap, as in :meth:`find`."""
        memory, start = self._stamp_memory.read, self._stamp_memory.start
        touched: i64 = 0
        for each in range(count):
            if slots[each] >= 0:
                touched ^= memory[start + slots[each]]
        self._touched = touched

    def set_at(self, slot: i64) -> i64:
        """Returns one element of :attr:`set_ids`."""
        return read_i64_le(self._set_memory.read, self._set_memory.start + 4 * slot) & _LOW_HALF

    def stamp_at(self, slot: i64) -> i64:
        """Returns one element of :attr:`stamps`."""
        return self._stamp_memory.read[self._stamp_memory.start + slot]

    def taken(self, start: int, end: int) -> Slots:
        """Returns the slots of a range that are not free."""
        found: Slots = np.flatnonzero(self.set_ids[start:end]) + start
        return found

    def print_of(self, slots: Slots) -> Prints:
        prints: Prints = self._flat[slots]
        return prints

    # -- changes

    def insert(self, print_: i64) -> i64:
        """Returns the slot that a new key has from now on; :meth:`put` must be called before any other change. Returns
        :data:`THERE` if the key is there after all. Returns :data:`CROWDED` if there is no room: nothing has changed,
        and :meth:`make_room` must be called first."""
        memory, start = self._print_memory.read, self._print_memory.start
        buckets: i64 = self.buckets
        level: i64 = self._level
        mask = 2 * level - 1
        bucket = print_ & mask
        slot: i64 = CROWDED
        free: i64 = 0
        end: i64 = SLOTS
        for _ in range(2):
            if bucket >= buckets:
                bucket -= level
            at = start + 8 * SLOTS * bucket
            found: i64 = CROWDED
            free_here: i64 = 0
            for each in range(end):
                here = read_i64_le(memory, at + 8 * each)
                if here == 0:
                    if free_here == 0:
                        found = SLOTS * bucket + each
                    free_here += 1
                elif here == print_:
                    return THERE
            if free_here > free:
                slot, free = found, free_here
            if free >= _SPARE:  # a key that came just now would be here: there was no less room then
                break
            bucket = print_ >> 32 & mask
        if slot >= 0:
            self._prints_one[slot] = print_
        return slot

    def put(self, slots: vec[i64], set_id: int, stamp: int) -> None:
        """Writes the set and the stamp of slots that were given to keys since the last call. To write to a large table
        one by one would take several times as long."""
        if len(slots):
            array = _as_array(slots)
            self.set_ids[array] = set_id
            self.stamps[array] = stamp
            self.keys += len(slots)

    def make_room(self, print_: int) -> None:
        """Makes room for a key whose buckets are full: one of the keys there moves to its other bucket. If that is full
        for all of them, a small table grows, and a large one loses a key: that is one in a million insertions."""
        while True:
            first, second = (self._bucket_of(half) * SLOTS for half in (print_, print_ >> 32))
            slots = [*range(first, first + SLOTS), *range(second, second + SLOTS)]
            if any(self._prints_one[slot] == 0 or self._moves(slot) for slot in slots):
                return
            if self.buckets >= min(self._most, _SMALL):
                self._push_out(slots)
                return
            self.grow(self.buckets * SLOTS)

    def free(self, slots: Slots) -> None:
        """Frees slots that differ and are all taken."""
        self._flat[slots] = 0
        self.set_ids[slots] = 0
        self.keys -= len(slots)

    def free_some(self, slots: vec[i64]) -> None:
        """Frees slots as :meth:`free` does; there may be none."""
        if len(slots):
            self.free(_as_array(slots))

    def grow(self, keys: int) -> None:
        """Makes room for ``keys`` keys, as far as the limit goes, and for some that come next."""
        want = min(self._most, int(keys / _GROWING) + 1)
        if want > self.buckets:
            want = min(self._most, want + min(_AHEAD, self.buckets // 8))
        while self.buckets < want:
            if self.buckets == self._reserved:
                self._reserve(2 * self._reserved)
            self._split(min(want, self._reserved, 2 * self._level) - self.buckets)

    # -- inside

    def _bucket_of(self, value: int) -> int:
        bucket = value & (2 * self._level - 1)
        return bucket if bucket < self.buckets else bucket - self._level

    def _reserve(self, buckets: int) -> None:
        print_memory = _Memory(8 * buckets * SLOTS, self._advise)
        set_memory = _Memory(4 * buckets * SLOTS, self._advise)
        stamp_memory = _Memory(buckets * SLOTS, self._advise)
        prints = print_memory.array(np.int64).reshape(buckets, SLOTS)
        set_ids = set_memory.array(np.uint32)
        stamps = stamp_memory.array(np.uint8)
        if self._reserved:
            prints[: self.buckets] = self._prints[: self.buckets]
            set_ids[: self.slots] = self.set_ids[: self.slots]
            stamps[: self.slots] = self.stamps[: self.slots]
        self._reserved, self._print_memory, self._set_memory = buckets, print_memory, set_memory
        self._stamp_memory = stamp_memory
        self._prints, self._flat, self.set_ids, self.stamps = prints, prints.reshape(-1), set_ids, stamps
        # an element of an array takes five times as long as one of these
        self._prints_one, self.set_ids_one, self.stamps_one = self._flat.data, set_ids.data, stamps.data

    def _split(self, count: int) -> None:
        """Splits the next ``count`` buckets: what belongs there moves to as many new ones at the end."""
        level, first, end = self._level, self.buckets - self._level, self.buckets
        old, new = slice(first, first + count), slice(end, end + count)
        prints = self._prints[old]
        here = np.arange(first, first + count, dtype=np.int64)[:, None]
        there = here + np.int64(level)
        wide, narrow = np.int64(2 * level - 1), np.int64(level - 1)
        # a key is here by its second hash if it cannot be by its first
        hashes = np.where(prints & narrow == here, prints, prints >> _SECOND)
        moves = (hashes & wide == there) & (prints != 0)
        for array in (self._prints, self.set_ids.reshape(-1, SLOTS), self.stamps.reshape(-1, SLOTS)):
            array[new] = np.where(moves, array[old], 0)
        self._prints[old][moves] = 0
        self.set_ids.reshape(-1, SLOTS)[old][moves] = 0
        self.buckets += count
        if self.buckets == 2 * level:
            self._level *= 2

    def _moves(self, slot: int) -> bool:
        """Moves the key in this slot to its other bucket, if it can; returns whether it did."""
        print_ = self._prints_one[slot]
        for half in (print_, print_ >> 32):
            first = self._bucket_of(half) * SLOTS
            for target in range(first, first + SLOTS):
                if self._prints_one[target] == 0:
                    for column in (self._prints_one, self.set_ids_one, self.stamps_one):
                        column[target] = column[slot]
                    self._prints_one[slot] = self.set_ids_one[slot] = 0
                    if self.watched is not None:
                        self.watched.append(target)
                    return True
        return False


def _as_array(numbers: vec[i64]) -> NDArray[np.int64]:
    return np.frombuffer(memoryview(numbers), np.int64)


def _slot_in(memory: bytes, start: i64, first: i64, print_: i64) -> i64:
    """Returns the slot with this fingerprint in the bucket that begins with the slot ``first``; -1 if it is in none."""
    at, end = start + 8 * first, first + SLOTS
    for slot in range(first, end):
        if read_i64_le(memory, at) == print_:
            return slot
        at += 8
    return -1
