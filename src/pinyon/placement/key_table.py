"""A hash table of block keys in arrays: 13 bytes a slot, no object per key, and no pause when it grows.

A key is known by a fingerprint of 64 bits: one key in 10^12 looks like one of ten million others, and what is read from
here is a hint. It may be in two buckets of eight slots, the first one while that has room (two-choice hashing, Azar et
al. 1994), so most look-ups touch one cache line. Growth splits a few buckets at a time (linear hashing, Litwin 1980)
over arrays that are reserved at full size: memory that was never touched costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, TypeVar

import numpy as np
from librt.strings import read_i32_le, read_i64_le
from librt.vecs import vec
from mypy_extensions import i64
from numpy.typing import NDArray

from pinyon.core.compiled import compiled

__all__ = [
    "CROWDED",
    "SLOTS",
    "THERE",
    "Advise",
    "KeyTable",
    "Marks",
    "fingerprint",
    "fingerprints",
    "fingerprints_one_by_one",
]

SLOTS: Final = 8
"""Of a bucket."""
BUCKETS_MIN = 8
THERE: Final = -1
CROWDED: Final = -2
"""Instead of a slot: the key is there already, and it has no room unless another one moves."""
_SPARE: Final = 3
"""The second bucket is taken where the first one has fewer free slots than this, and than the second."""
_GROWING = 4.8
"""Keys per bucket while the table grows: buckets that are split hold half of what the others do."""
_GROWN = 6.0
"""And at its full size, at most."""
_AHEAD = 512
"""Buckets that are split ahead of their time, in ~0.1 ms: few keys at a time need not grow the table each time."""
_RESERVED_BUCKETS_MAX = 1 << 24
"""Beyond it (100 million keys) arrays are copied when they are full."""
_SMALL = 1 << 12
"""Buckets of a table that may grow by half at once."""
_TOGETHER = 64
"""Keys at most that are looked for in both of their buckets at once."""
_SECOND = np.uint64(32)
_ONE = np.uint64(1)
_ONES = np.uint64(0x0101010101010101)
_TOP_BYTE = np.uint64(56)
_ODD = 0x9E3779B97F4A7C15
_ODDER = 0xC2B2AE3D27D4EB4F
_ALL = (1 << 64) - 1
_ODD_HIGH: Final = 0x9E3779B9
_ODD_LOW: Final = 0x7F4A7C15
_ODDER_HIGH: Final = 0xC2B2AE3D
_ODDER_LOW: Final = 0x27D4EB4F
"""The same two in halves: compiled code has no larger numbers of its own."""
_LOW_HALF: Final = 0xFFFFFFFF
_PAIRS, _HALVES = Struct("<QQ"), Struct("<qq")
_LINE: Final = 64

Advise = Callable[[int, int], None]
"""Is told of memory before it is used: its address, and how many bytes there are."""
Slots = NDArray[np.int64]
"""Numbers of slots, (n,)."""
Prints = NDArray[np.uint64]
"""Fingerprints, (n,), never 0."""
Number = TypeVar("Number", np.uint64, np.uint32, np.uint8)


def fingerprints(packed_keys: bytes) -> Prints:
    """Of packed keys. Keys are random already; those of simulations and tests are small numbers, and spread by this."""
    low, high = np.frombuffer(packed_keys, "<u8").reshape(-1, 2).T
    prints = high >> _SECOND
    prints ^= high
    prints *= np.uint64(_ODD)
    prints ^= low
    prints *= np.uint64(_ODDER)
    prints ^= prints >> _SECOND
    prints[prints == 0] = 1
    return prints


def fingerprints_one_by_one(packed_keys: bytes) -> Iterator[int]:
    """The same of a few keys, in less time."""
    for low, high in _PAIRS.iter_unpack(packed_keys):
        value = (low ^ (high ^ high >> 32) * _ODD & _ALL) * _ODDER & _ALL
        yield value ^ value >> 32 or 1


def fingerprint(low: i64, high: i64) -> i64:
    """The same of one key, whose halves these are; both are signed."""
    if not compiled():  # compiled arithmetic wraps, Python's does not
        return _signed(next(fingerprints_one_by_one(_HALVES.pack(low, high))))
    odd, odder = (i64(_ODD_HIGH) << 32) + _ODD_LOW, (i64(_ODDER_HIGH) << 32) + _ODDER_LOW
    value = ((high ^ (high >> 32 & _LOW_HALF)) * odd ^ low) * odder
    value ^= value >> 32 & _LOW_HALF
    if value == 0:
        return 1
    return value


def _signed(value: int) -> int:
    return value - (value >> 63 << 64)


class _Memory:
    """Zeros that arrays change, and that compiled loops read as bytes as fast as C does. As long as nobody touches them
    they cost nothing. Nobody else has these bytes, so nobody expects them to stay as they are."""

    def __init__(self, size: int, advise: Advise | None) -> None:
        self.read = bytes(size + _LINE)
        self._address: int = np.frombuffer(self.read, np.uint8).__array_interface__["data"][0]
        self.start: i64 = -self._address % _LINE
        """Where a line of the processor's cache begins."""
        self._size = size
        if advise is not None:
            advise(self._address, size)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Bytes that may be written. Who has such an array keeps this."""
        return {"data": (self._address + self.start, False), "shape": (self._size,), "typestr": "|u1", "version": 3}

    def array(self, dtype: type[Number]) -> NDArray[Number]:
        """All of it."""
        return np.asarray(self).view(dtype)


class Marks:
    """Slots of one operation, up to so many, each with a number that goes with it: what is to be written to a table at
    its end, in one operation on arrays. To write it one by one takes ten times as long. Where a slot is here differs in
    each process: who chooses keys cannot choose such as are all in one place."""

    def __init__(self, count: i64) -> None:
        self._secret: i64 = hash("a slot's place") | 1
        self._shift: i64 = 60
        size: i64 = 16
        while size < 2 * count:
            size *= 2
            self._shift -= 1
        self._last = size - 1
        self._slots = vec[i64]([0] * size)
        """One more than the slot; 0 is a free place."""
        self._numbers = vec[i64]([0] * size)

    def add(self, slot: i64, number: i64 = 0) -> bool:
        """Whether it was not there yet."""
        at = self._at(slot)
        if self._slots[at]:
            return False
        self._slots[at], self._numbers[at] = slot + 1, number
        return True

    def of(self, slot: i64) -> i64:
        """Its number; 0 also if it is not there."""
        return self._numbers[self._at(slot)]

    def _at(self, slot: i64) -> i64:
        """Where it is, or would be."""
        slots, last = self._slots, self._last
        at = slot * self._secret >> self._shift & last
        while slots[at] and slots[at] != slot + 1:
            at = at + 1 & last
        return at


class KeyTable:
    """Fingerprint → number of a holder set, and a stamp. A slot whose fingerprint is 0 is free.

    What a slot stands for is not this class's business: who frees slots keeps the books.
    """

    def __init__(self, keys_max: int, push_out: Callable[[list[int]], int], advise: Advise | None = None) -> None:
        """``push_out`` frees one of these slots and tells which: a new key has nowhere else to go."""
        self._push_out = push_out
        self._advise = advise
        self._most = max(BUCKETS_MIN, 1 << (int(keys_max / _GROWN)).bit_length())
        self._reserved = 0
        self.buckets = self._level = BUCKETS_MIN
        self.keys = 0
        """Slots that are not free."""
        self.watched: list[int] | None = None
        """Slots that a key moved into, where somebody wants to know."""
        self._touched: i64 = 0
        """Only so that no compiler leaves those reads out."""
        self._prints: NDArray[np.uint64] = np.zeros((0, SLOTS), np.uint64)
        self.set_ids: NDArray[np.uint32] = np.zeros(0, np.uint32)
        """By slot, the number of its set; 0 where it is free."""
        self.stamps: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._reserve(min(self._most, _RESERVED_BUCKETS_MAX) if keys_max < 1 << 27 else 1 << 12)

    @property
    def slots(self) -> int:
        return self.buckets * SLOTS

    @property
    def room(self) -> float:
        """Keys that it takes before it has to grow."""
        return self.buckets * (_GROWN if self.buckets == self._most else _GROWING)

    # -- look-ups

    def locate(self, prints: Prints) -> Slots:
        """Their slots; -1 for those that are not there."""
        count = len(prints)
        if count <= _TOGETHER:  # both buckets at once: what costs is the number of operations
            both = np.concatenate((prints, prints >> _SECOND)).view(np.int64)
            at, found = self._found(self._buckets_of(both), np.concatenate((prints, prints)))
            slots = np.full(count, -1, np.int64)
            slots[at % count if count else at] = found
            return slots
        at, found = self._found(self._buckets_of(prints.view(np.int64)), prints)
        if len(at) == count:
            return found
        slots = np.full(count, -1, np.int64)
        slots[at] = found
        left = (slots < 0).nonzero()[0]
        rest = prints[left]
        at, found = self._found(self._buckets_of((rest >> _SECOND).view(np.int64)), rest)
        slots[left[at]] = found
        return slots

    def find(self, fingerprint: int) -> int:
        """The slot of one; -1 if it is not there."""
        for half in (fingerprint, fingerprint >> 32):
            base = self._bucket_of(half) * SLOTS
            row = self._flat_prints[base : base + SLOTS].tolist()
            if fingerprint in row:
                return base + row.index(fingerprint)
        return -1

    def find_together(self, prints: vec[i64], count: i64, slots: vec[i64], numbers: vec[i64]) -> None:
        """As :meth:`find`, of the first ``count`` of these, which are signed: their slots, and the numbers of the sets
        there (0 where the slot is -1). Each pass reads what the next one needs of all of them: such reads do not wait
        for one another, those of one search after the other do."""
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
            slots[each] = SLOTS * bucket
            touched ^= read_i64_le(memory, start + 8 * SLOTS * bucket)
            touched ^= i64(read_i32_le(sets, sets_start + 4 * SLOTS * bucket))
        for each in range(count):
            signed = prints[each]
            slot = _slot_in(memory, start, slots[each], signed)
            slots[each], numbers[each] = slot, 0
            if slot >= 0:
                numbers[each] = i64(read_i32_le(sets, sets_start + 4 * slot))
            else:
                bucket = signed >> 32 & mask & _LOW_HALF
                if bucket >= buckets:
                    bucket -= level
                numbers[each] = SLOTS * bucket
                touched ^= read_i64_le(memory, start + 8 * SLOTS * bucket)
        for each in range(count):
            if slots[each] < 0:
                slot = _slot_in(memory, start, numbers[each], prints[each])
                slots[each], numbers[each] = slot, 0
                if slot >= 0:
                    numbers[each] = i64(read_i32_le(sets, sets_start + 4 * slot))
        self._touched = touched

    def find_leading(self, packed_keys: bytes) -> list[int]:
        """The slots of a few keys, until one that is not there."""
        slots: list[int] = []
        prints, buckets, level, mask = self._flat_prints, self.buckets, self._level, 2 * self._level - 1
        for fingerprint in fingerprints_one_by_one(packed_keys):
            bucket = fingerprint & mask
            base = (bucket if bucket < buckets else bucket - level) * SLOTS
            row = prints[base : base + SLOTS].tolist()
            if fingerprint not in row:
                bucket = fingerprint >> 32 & mask
                base = (bucket if bucket < buckets else bucket - level) * SLOTS
                row = prints[base : base + SLOTS].tolist()
                if fingerprint not in row:
                    break
            slots.append(base + row.index(fingerprint))
        return slots

    # -- changes

    def insert(self, prints: Prints, set_id: int, stamp: int) -> int:
        """Keys that are not there, also such that are named twice; returns how many that were. Their slots may change
        with each key that comes after them."""
        inserted = 0
        while len(prints):
            buckets = self._buckets_of(prints.view(np.int64))
            free = self._free_in(buckets)
            counts = _count(free)
            few = np.flatnonzero(counts < _SPARE)
            if len(few):
                second = self._buckets_of((prints[few] >> _SECOND).view(np.int64))
                free_there = self._free_in(second)
                better = _count(free_there) > counts[few]
                there = few[better]
                buckets[there], free[there] = second[better], free_there[better]
                full = free[few] == 0
                if full.any():
                    inserted += self._insert_crowded(prints[few[full]], set_id, stamp)
                    prints = np.delete(prints, few[full])  # and the others may find something else by now
                    continue
            slots = (buckets << 3) + _first(free)
            # each writes its number; who reads another one there came too late, or is the same key
            numbers = np.arange(len(prints), dtype=np.uint32)
            self.set_ids[slots] = numbers
            owners = self.set_ids[slots]
            won = owners == numbers
            taken = slots[won]
            self._flat[taken] = prints[won]
            self.set_ids[taken] = set_id
            self.stamps[taken] = stamp
            inserted += len(taken)
            self.keys += len(taken)
            late = np.flatnonzero(~won)
            prints = prints[late][prints[owners[late]] != prints[late]]
        return inserted

    def insert_one(self, fingerprint: int, set_id: int, stamp: int) -> None:
        """One that is not there."""
        first = self._bucket_of(fingerprint) * SLOTS
        row = self._flat_prints[first : first + SLOTS].tolist()
        free = row.count(0)
        if free < _SPARE:
            second = self._bucket_of(fingerprint >> 32) * SLOTS
            row_there = self._flat_prints[second : second + SLOTS].tolist()
            if row_there.count(0) > free:
                first, row, free = second, row_there, 1
        slot = first + row.index(0) if free else self._make_room(fingerprint)
        self._flat_prints[slot] = fingerprint
        self.set_ids_one[slot] = set_id
        self.stamps_one[slot] = stamp
        self.keys += 1

    def place_in_loop(self, signed: i64, marks: Marks) -> i64:
        """A free slot for one, which is marked with it: it is to be :meth:`put` there. Or :data:`THERE`: one of those
        that are marked is the same. Or :data:`CROWDED`: nothing has changed."""
        memory, start = self._print_memory.read, self._print_memory.start
        buckets: i64 = self.buckets
        level: i64 = self._level
        mask = 2 * level - 1
        bucket = signed & mask
        slot: i64 = CROWDED
        free: i64 = 0
        for look in range(2):
            if bucket >= buckets:
                bucket -= level
            first = SLOTS * bucket
            at = start + 8 * first
            free_here: i64 = 0
            found: i64 = CROWDED
            for each in range(i64(SLOTS)):
                here = read_i64_le(memory, at + 8 * each)
                if here == 0:
                    here = marks.of(first + each)
                    if here == signed:
                        return THERE
                if here == 0:
                    if free_here == 0:
                        found = first + each
                    free_here += 1
            if look == 0 or (free < _SPARE and free_here > free):
                slot, free = found, free_here
            if free >= _SPARE:  # the same one would be here: there was no less room then
                break
            bucket = signed >> 32 & mask & _LOW_HALF
        if slot != CROWDED:
            marks.add(slot, signed)
        return slot

    def put(self, slots: Slots, signed: Slots, set_id: int, stamp: int) -> None:
        """Keys that are not there into different free slots."""
        self._prints_signed[slots] = signed
        self.set_ids[slots] = set_id
        self.stamps[slots] = stamp
        self.keys += len(slots)

    def touch_stamps(self, slots: vec[i64], count: i64) -> None:
        """The stamps of the first ``count`` of these (-1: none) are read next: such reads do not wait for one another
        here, as in :meth:`find_together`."""
        memory, start = self._stamp_memory.read, self._stamp_memory.start
        touched: i64 = 0
        for each in range(count):
            if slots[each] >= 0:
                touched ^= i64(memory[start + slots[each]])
        self._touched = touched

    def stamp_at(self, slot: i64) -> i64:
        """As :attr:`stamps`."""
        return self._stamp_memory.read[self._stamp_memory.start + slot]

    def free(self, slots: Slots) -> None:
        """Different ones, each of them taken."""
        self._flat[slots] = 0
        self.set_ids[slots] = 0
        self.keys -= len(slots)

    def free_one(self, slot: int) -> None:
        self._flat_prints[slot] = self.set_ids_one[slot] = 0
        self.keys -= 1

    def grow(self, keys: int) -> None:
        """Make room for so many, as far as the limit goes, and for some that come next."""
        want = min(self._most, int(keys / _GROWING) + 1)
        if want > self.buckets:
            want = min(self._most, want + min(_AHEAD, self.buckets // 8))
        while self.buckets < want:
            if self.buckets == self._reserved:
                self._reserve(2 * self._reserved)
            self._split(min(want, self._reserved, 2 * self._level) - self.buckets)

    def taken(self, start: int, end: int) -> Slots:
        """Slots of a range that are not free."""
        found: Slots = np.flatnonzero(self.set_ids[start:end]) + start
        return found

    def print_of(self, slots: Slots) -> Prints:
        prints: Prints = self._flat[slots]
        return prints

    # -- inside

    def _found(self, buckets: Slots, prints: Prints) -> tuple[Slots, Slots]:
        """Which of them are in these buckets, and their slots."""
        # ``take`` that does not check its numbers gets a row in a third of the time
        found = (self._prints.take(buckets, axis=0, mode="clip") == prints[:, None]).reshape(-1).nonzero()[0]
        at = found >> 3
        return at, (buckets[at] << 3) + (found & 7)

    def _free_in(self, buckets: Slots) -> Prints:
        return _packed(self._prints.take(buckets, axis=0, mode="clip") == 0)

    def _insert_crowded(self, prints: Prints, set_id: int, stamp: int) -> int:
        """Whose buckets are full."""
        inserted = 0
        for fingerprint in prints.tolist():
            if self.find(fingerprint) < 0:  # else it is named twice
                self.insert_one(fingerprint, set_id, stamp)
                inserted += 1
        return inserted

    def _buckets_of(self, hashes: NDArray[np.int64]) -> Slots:
        if self.buckets == self._level:
            return hashes & (self._level - 1)
        buckets = hashes & (2 * self._level - 1)
        np.subtract(buckets, self._level, out=buckets, where=buckets >= self.buckets)
        return buckets

    def _bucket_of(self, value: int) -> int:
        bucket = value & (2 * self._level - 1)
        return bucket if bucket < self.buckets else bucket - self._level

    def _reserve(self, buckets: int) -> None:
        print_memory = _Memory(8 * buckets * SLOTS, self._advise)
        set_memory = _Memory(4 * buckets * SLOTS, self._advise)
        stamp_memory = _Memory(buckets * SLOTS, self._advise)
        prints = print_memory.array(np.uint64).reshape(buckets, SLOTS)
        set_ids = set_memory.array(np.uint32)
        stamps = stamp_memory.array(np.uint8)
        if self._reserved:
            prints[: self.buckets] = self._prints[: self.buckets]
            set_ids[: self.slots] = self.set_ids[: self.slots]
            stamps[: self.slots] = self.stamps[: self.slots]
        self._reserved, self._print_memory, self._set_memory = buckets, print_memory, set_memory
        self._stamp_memory = stamp_memory
        self._prints, self._flat, self.set_ids, self.stamps = prints, prints.reshape(-1), set_ids, stamps
        # an element of an array costs five times one of these
        self._flat_prints, self.set_ids_one, self.stamps_one = self._flat.data, set_ids.data, stamps.data
        self._prints_signed = self._flat.view(np.int64)

    def _split(self, count: int) -> None:
        """Of the next ``count`` buckets, what belongs there moves to as many new ones at the end."""
        level, first, end = self._level, self.buckets - self._level, self.buckets
        old, new = slice(first, first + count), slice(end, end + count)
        prints = self._prints[old]
        here = np.arange(first, first + count, dtype=np.uint64)[:, None]
        there = here + np.uint64(level)
        wide, narrow = np.uint64(2 * level - 1), np.uint64(level - 1)
        # a key is here by its second hash where it cannot be by its first
        hashes = np.where(prints & narrow == here, prints, prints >> _SECOND)
        moves = (hashes & wide == there) & (prints != 0)
        for array in (self._prints, self.set_ids.reshape(-1, SLOTS), self.stamps.reshape(-1, SLOTS)):
            array[new] = np.where(moves, array[old], 0)
        self._prints[old][moves] = 0
        self.set_ids.reshape(-1, SLOTS)[old][moves] = 0
        self.buckets += count
        if self.buckets == 2 * level:
            self._level *= 2

    def _make_room(self, fingerprint: int) -> int:
        """A slot for a key whose buckets are full: one of the keys there moves to its other bucket. Where that is full
        too for all of them, a small table grows, and of a large one a key goes: that is one in a million insertions."""
        bases = [self._bucket_of(half) * SLOTS for half in (fingerprint, fingerprint >> 32)]
        slots = [base + offset for base in bases for offset in range(SLOTS)]
        for slot in slots:
            tenant = self._flat_prints[slot]
            if not tenant:
                return slot
            for half in (tenant, tenant >> 32):
                other = self._bucket_of(half) * SLOTS
                row = self._flat_prints[other : other + SLOTS].tolist()
                if 0 in row:
                    target = other + row.index(0)
                    for view in (self._flat_prints, self.set_ids_one, self.stamps_one):
                        view[target] = view[slot]
                    if self.watched is not None:
                        self.watched.append(target)
                    return slot
        if self.buckets < min(self._most, _SMALL):
            self.grow(self.buckets * SLOTS)
            return self._make_room(fingerprint)
        return self._push_out(slots)


def _slot_in(memory: bytes, start: i64, first: i64, signed: i64) -> i64:
    """The slot with this fingerprint in the bucket that begins with the ``first``; -1 if it is in none of them."""
    at = start + 8 * first
    for slot in range(i64(SLOTS)):
        if read_i64_le(memory, at + 8 * slot) == signed:
            return first + slot
    return -1


# Eight truths side by side are one number of eight bytes: what is asked of a bucket is then a few operations on all.


def _packed(rows: NDArray[np.bool_]) -> Prints:
    """(n, 8) truths as (n,) numbers with a byte for each."""
    packed: Prints = rows.view("<u8")[:, 0]
    return packed


def _count(packed: Prints) -> Prints:
    """How many are true."""
    return packed * _ONES >> _TOP_BYTE


def _first(packed: Prints) -> Slots:
    """Which is the first true one."""
    lowest = packed & (~packed + _ONE)
    return _count((lowest - _ONE) & _ONES).view(np.int64)
