"""The holders of each key: the table of keys, their sets of holders, and their ages, kept together.

What a holder reports is stored under a *row* of the sets. Rows come and go: a snapshot is stored under a new one, and a
holder that is dropped leaves one behind. A void row is in no answer from that moment on, and is cleared from the table
in portions (:meth:`Holdings.collect`). Nothing here takes long at once."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64
from numpy.typing import NDArray

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.key_sample import key_sample
from pinyon.placement.holder_sets import SETS_MAX, HolderSets
from pinyon.placement.key_ages import EPOCHS, STAMPS, KeyAges
from pinyon.placement.key_table import CROWDED, THERE, Advise, KeyTable, Slots, read_prints
from pinyon.placement.prefix_match import bits

COLLECT_SLOTS = 16_384
"""Slots that are searched for void rows in one go: ~0.2 ms."""
_COLLECT_SETS = 1024
"""The maximum number of sets that one go changes for the first time."""
_COLLECT_SHARE = 1024
"""The share of the table, one in so many slots, that is searched when a row becomes void."""
_EVICT_SLOTS = 32_768
_EVICT_KEYS = 1024
_TOGETHER: Final = 32
"""Keys whose buckets are brought from memory at the same time."""


class Holdings:
    """Keys and the rows that each is held under; at most ``keys_max`` keys."""

    def __init__(self, keys_max: int, sets_max: int = SETS_MAX, advise: Advise | None = None) -> None:
        self._keys_max = keys_max
        self.table = KeyTable(keys_max, self._push_out, advise)
        self._sets = HolderSets(sets_max)
        self._ages = KeyAges(keys_max)
        self._hand = 0
        """The slot where the search for old keys goes on."""
        self._owners: dict[int, int] = {}
        """The holder's bit by row; 0 where the row is void."""
        self._shown: dict[int, int] = {0: 0}
        """The bits of a set's holders, by number of the set."""
        self._void = 0
        """A mask of the rows whose content is void, and that sets still have."""
        self._clearing = 0
        """The void rows of the present round through the table."""
        self._cleared_slots = 0
        self._without: NDArray[np.int64] = np.zeros(0, np.int64)
        """The number of the set without these rows, by number of a set; -1: not known."""
        self.evicted = 0
        self.refused = 0
        self._found = vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER)
        """Fingerprints, slots and numbers of sets, for some keys at a time."""

    def keys_under(self, row: int) -> int:
        """Returns how many keys are held under a row that is not void."""
        return self._sets.held[row]

    def store(self, row: int, packed_keys: bytes) -> None:
        """Stores these keys under the row."""
        table, ages, new = self.table, self._ages, len(packed_keys) // KEY_BYTES
        if new > self._keys_max:
            self.evicted += new - self._keys_max
            packed_keys, new = packed_keys[: self._keys_max * KEY_BYTES], self._keys_max
        if self._sets.drop_unused():  # numbers may mean other sets now
            self._shown, self._without = {0: 0}, np.zeros(0, np.int64)
        keys = table.keys + new
        ages.begins(new, max(0, keys - self._keys_max), table.stamps)
        table.grow(min(keys, self._keys_max))
        at, size = 0, new * KEY_BYTES
        while (at := self._store(row, packed_keys, at)) < size:
            if table.keys >= self._keys_max:
                self._evict()
            else:
                prints = self._found[0]
                read_prints(packed_keys, at, prints)
                table.make_room(prints[0])

    def _store(self, row: int, packed_keys: bytes, at: i64) -> int:
        """Stores the keys from byte ``at`` on, up to one that has no room unless another one moves or goes. Returns the
        byte where that one begins. Counts change alike for most keys, so they are added up for many keys at a time."""
        table, sets, ages = self.table, self._sets, self._ages
        prints, slots, numbers = self._found
        size: i64 = len(packed_keys)
        room: i64 = self._keys_max - table.keys
        stamp: i64 = ages.stamp
        alone: i64 = sets.alone(row)
        come: i64 = 0
        before: i64 = alone
        after: i64 = alone
        moved: i64 = 0
        was: i64 = stamp
        renewed: i64 = 0
        refuses = crowded = False
        while at < size and not crowded:
            count = read_prints(packed_keys, at, prints)
            table.find(prints, count, slots, numbers)
            table.touch_stamps(slots, count)
            for each in range(count):
                slot = slots[each]
                if slot < 0:
                    slot = CROWDED
                    if come < room:
                        slot = table.insert(prints[each], alone, stamp)
                    if slot == CROWDED:
                        crowded = True
                        count = each
                        break
                    if slot != THERE:
                        come += 1
                    continue
                number = table.set_at(slot)  # read again: a key may be named twice
                if number != before:
                    sets.extend(before, after, row, moved)
                    before, moved = number, 0
                    after = sets.extended(number, row)
                    refuses = after == number and not sets.masks[number] >> row & 1
                if after != number:
                    table.change_set(slot, after)
                    moved += 1
                elif refuses:
                    self.refused += 1
                here = table.stamp_at(slot)
                if here != stamp:
                    if here != was:
                        ages.renewed(was, renewed)
                        was, renewed = here, 0
                    table.change_stamp(slot, stamp)
                    renewed += 1
            at += count * KEY_BYTES
        sets.extend(before, after, row, moved)
        ages.renewed(was, renewed)
        sets.extend(0, alone, row, come)
        ages.came(come)
        return at

    def remove(self, row: int, packed_keys: bytes) -> None:
        """Removes these keys from the row."""
        table, sets, ages = self.table, self._sets, self._ages
        prints, slots, numbers = self._found
        at: i64 = 0
        size: i64 = len(packed_keys)
        before: i64 = 0
        after: i64 = 0
        left: i64 = 0
        was: i64 = 0
        gone_so: i64 = 0
        while at < size:
            count = read_prints(packed_keys, at, prints)
            table.find(prints, count, slots, numbers)
            table.touch_stamps(slots, count)
            for each in range(count):
                slot = slots[each]
                if slot < 0:
                    continue
                number = table.set_at(slot)  # read again: a key may be named twice
                if number == 0:
                    continue
                if number != before:
                    sets.reduce(before, after, row, left)
                    before, left = number, 0
                    after = sets.reduced(number, row)
                if after == 0:
                    here = table.stamp_at(slot)
                    if here != was:
                        ages.gone(was, gone_so)
                        was, gone_so = here, 0
                    gone_so += 1
                    left += 1
                    table.remove(slot)
                elif after != number:
                    table.change_set(slot, after)
                    left += 1
            at += count * KEY_BYTES
        sets.reduce(before, after, row, left)
        ages.gone(was, gone_so)

    def _free(self, slots: Slots) -> Counter[int]:
        """Forgets the keys in these slots; returns how many had each set."""
        gone = self._sets.forget(self.table.set_ids[slots])
        self._ages.forget(self.table.stamps[slots])
        self.table.free(slots)
        return gone

    def used(self, packed_keys: bytes, every: int, last_slot: int) -> None:
        """Renews the keys of a prompt that was looked up, as a sample of one in ``every``. ``last_slot`` is the slot of
        the last one that was found (-1: none). If that key is new, so are the others."""
        if last_slot < 0 or 2 * self.table.keys <= self._keys_max:
            return
        table, ages = self.table, self._ages
        stamp = ages.stamp
        if table.stamp_at(last_slot) == stamp:
            return
        prints, slots, numbers = self._found
        sample = key_sample(packed_keys, every)
        at: i64 = 0
        size: i64 = len(sample)
        while at < size:
            count = read_prints(sample, at, prints)
            table.find(prints, count, slots, numbers)
            for each in range(count):
                slot = slots[each]
                if slot >= 0 and (here := table.stamp_at(slot)) != stamp:
                    ages.renewed(here, 1)
                    table.change_stamp(slot, stamp)
            at += count * KEY_BYTES

    # -- eviction of the oldest

    def _evict(self) -> None:
        """Evicts one of the oldest keys, or some more, as the search for them is what costs."""
        table, ages = self.table, self._ages
        left = min(max(1, min(_EVICT_KEYS, self._keys_max // EPOCHS)), ages.before_present)
        looked, age = 0, max(1, ages.oldest())
        while left > 0:
            start, end = self._hand, min(self._hand + _EVICT_SLOTS, table.slots)
            old = ages.older(table.stamps[start:end], age)
            found = np.flatnonzero(old & (table.set_ids[start:end] != 0)) + start
            if len(found) > left:
                found = found[:left]
                end = int(found[-1]) + 1
            if len(found):
                self._count_evicted(self._free(found))
            left -= len(found)
            looked += end - start
            self._hand = end if end < table.slots else 0
            if looked > table.slots:
                looked, age = 0, max(1, ages.oldest())

    def _push_out(self, slots: list[int]) -> None:
        ages = [(self._ages.stamp - self.table.stamp_at(slot)) % STAMPS for slot in slots]
        slot = slots[ages.index(max(ages))]
        self._count_evicted(self._free(np.array([slot])))

    def _count_evicted(self, gone: Counter[int]) -> None:
        self.evicted += sum(keys * self.shown_of(number).bit_count() for number, keys in gone.items())

    # -- rows of the sets

    def new_row(self, bit: int) -> int:
        """Returns a new row for the holder with this bit."""
        row = next(row for row in count() if row not in self._owners)
        self._owners[row] = bit
        self._sets.add_row(row)
        return row

    def hide(self, row: int | None) -> None:
        """Makes a row void; does nothing for None."""
        if row is None:
            return
        self._shown = {0: 0}
        if not self._sets.held[row]:
            del self._owners[row]
            return
        self._owners[row] = 0
        self._void |= 1 << row
        self.collect(max(COLLECT_SLOTS, self.table.slots // _COLLECT_SHARE))

    def shown_of(self, number: int) -> int:
        """Returns the bits of a set's holders, without void rows."""
        shown = self._shown.get(number)
        if shown is None:
            shown = 0
            for row in self._sets.rows(number).tolist():
                shown |= self._owners[row]
            self._shown[number] = shown
        return shown

    def collect(self, slots_max: int = COLLECT_SLOTS) -> bool:
        """Searches at most ``slots_max`` slots for void rows, and clears them. Returns whether more is left to do."""
        table, sets = self.table, self._sets
        if not self._clearing:
            if not self._void:
                return False
            self._clearing, self._cleared_slots, table.watched = self._void, 0, []
            self._without = np.full(len(sets.masks), -1, np.int64)
        start, end = self._cleared_slots, min(self._cleared_slots + slots_max, table.slots)
        while not self._clear(table.taken(start, end)):
            end = start + (end - start) // 2
        self._cleared_slots = end
        if end == table.slots:
            for slot in set(table.watched or ()):
                self._clear(table.taken(slot, slot + 1))
            for bit in bits(self._clearing):
                del self._owners[bit.bit_length() - 1]
            self._void &= ~self._clearing
            self._clearing, table.watched = 0, None
        return bool(self._void)

    def _clear(self, slots: Slots) -> bool:
        """Clears void rows from these slots. Returns False, without a change, if that is too much at once."""
        table, sets = self.table, self._sets
        if len(self._without) < len(sets.masks):
            more = np.full(len(sets.masks) - len(self._without), -1, np.int64)
            self._without = np.append(self._without, more)
        numbers = table.set_ids[slots]
        unknown = np.flatnonzero(np.bincount(numbers[self._without[numbers] < 0]))
        if len(unknown) > _COLLECT_SETS:
            return False
        for number in unknown.tolist():
            self._without[number] = sets.without(number, self._clearing)
        afters = self._without[numbers]
        changed = afters != numbers
        slots, numbers, afters = slots[changed], numbers[changed], afters[changed]
        for number, keys in Counter(numbers.tolist()).items():
            after = int(self._without[number])
            if after:
                sets.keys[number] -= keys
                sets.keys[after] += keys
        stay = afters > 0
        table.set_ids[slots[stay]] = afters[stay]
        self._free(slots[~stay])
        return True

    def check_integrity(self) -> None:
        """Asserts that all books agree with the table (for tests and idle times)."""
        table, sets = self.table, self._sets
        slots = table.taken(0, table.slots)
        assert len(slots) == table.keys <= self._keys_max
        prints = vec[i64](table.print_of(slots).tolist())
        found, numbers = vec[i64]([0] * len(prints)), vec[i64]([0] * len(prints))
        table.find(prints, len(prints), found, numbers)
        assert list(found) == slots.tolist()
        assert list(numbers) == table.set_ids[slots].tolist()
        sets_of = Counter(table.set_ids[slots].tolist())
        assert sets_of == {number: int(keys) for number, keys in enumerate(sets.keys) if keys > 0}
        assert np.bincount(table.stamps[slots], minlength=STAMPS).tolist() == self._ages.counts.tolist()
        held: Counter[int] = Counter()
        for number, keys in sets_of.items():
            held.update(dict.fromkeys(sets.rows(number).tolist(), keys))
        void = {bit.bit_length() - 1 for bit in bits(self._void)}
        assert held.keys() <= self._owners.keys()
        assert {row for row, owner in self._owners.items() if not owner} == void
        assert all(sets.held[row] == held[row] for row in self._owners if row not in void)
