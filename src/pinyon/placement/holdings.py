"""Which key is held by whom: the table of keys, their sets of holders, and their ages, as one.

What a holder has was told under a *row* of the sets. Rows come and go: a snapshot is told under a new one, and who is
dropped leaves one behind. A void row is in no answer from that moment on, and the table is rid of it in portions
(:meth:`Holdings.collect`). Nothing here takes long at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.compiled import compiled
from pinyon.core.key_sample import key_sample
from pinyon.placement.holder_sets import SETS_MAX, HolderSets
from pinyon.placement.holdings_loop import as_array, remove_in_loop, store_in_loop
from pinyon.placement.key_ages import EPOCHS, STAMPS, KeyAges
from pinyon.placement.key_table import Advise, KeyTable, Slots, fingerprints, fingerprints_one_by_one
from pinyon.placement.prefix_match import bits

__all__ = ["COLLECT_SLOTS", "Holdings"]

COLLECT_SLOTS = 16_384
"""Looked at in one go, for void rows: ~0.2 ms."""
_COLLECT_SETS = 1024
"""Of one go, sets that are changed for the first time."""
_COLLECT_SHARE = 1024
"""Rows become void no faster than this share of the table is looked at for each."""
_EVICT_SLOTS = 32_768
_EVICT_KEYS = 1024
_FEW_KEYS = 16
"""Are stored and removed one by one: an operation on arrays costs as much as a key."""


class Holdings:
    """Keys and the rows that each is held under; at most ``keys_max`` keys."""

    def __init__(self, keys_max: int, sets_max: int = SETS_MAX, advise: Advise | None = None) -> None:
        self._keys_max = keys_max
        self.table = KeyTable(keys_max, self._push_out, advise)
        self._sets = HolderSets(sets_max)
        self._ages = KeyAges(keys_max)
        self._hand = 0
        """Where the search for old keys goes on."""
        self._owners: dict[int, int] = {}
        """By row the holder's bit, 0 where the row is void."""
        self._shown: dict[int, int] = {0: 0}
        """By number of a set, the bits of its holders."""
        self._void = 0
        """Rows whose content is void: sets have them still."""
        self._clearing = 0
        """The void rows of the present round through the table."""
        self._cleared_slots = 0
        self._without: NDArray[np.int64] = np.zeros(0, np.int64)
        """By number of a set, the one without these rows; -1: not known."""
        self.evicted = 0
        self.refused = 0
        self.in_loops = compiled()
        """Keys are stored and removed one by one: elsewhere that is for a few."""

    def keys_under(self, row: int) -> int:
        """Keys that are held under a row that is not void."""
        return self._sets.held_one[row]

    def store(self, row: int, packed_keys: bytes) -> None:
        """These are held under the row now."""
        table, sets, new = self.table, self._sets, len(packed_keys) // KEY_BYTES
        if new > self._keys_max:
            self.evicted += new - self._keys_max
            packed_keys, new = packed_keys[: self._keys_max * KEY_BYTES], self._keys_max
        if sets.drop_unused():  # numbers may mean other sets from now on
            self._shown, self._without = {0: 0}, np.zeros(0, np.int64)
        keys = table.keys + new
        if self.in_loops and keys <= self._keys_max:
            self._store_in_loop(row, packed_keys)
            return
        if new > _FEW_KEYS or keys > self._keys_max or keys > table.room:
            self._store_many(row, fingerprints(packed_keys))
            return
        self._ages.begins(new, 0, table.stamps)
        alone, stamp, come = sets.alone(row), self._ages.stamp, 0
        for fingerprint in fingerprints_one_by_one(packed_keys):
            slot = table.find(fingerprint)
            if slot < 0:
                table.insert_one(fingerprint, alone, stamp)
                come += 1
                continue
            number = table.set_ids_one[slot]
            after = sets.extended(number, row)
            if after != number:
                table.set_ids_one[slot] = after
                sets.keys_one[number] -= 1
                sets.keys_one[after] += 1
                sets.held_one[row] += 1
            elif not sets.masks[number] >> row & 1:
                self.refused += 1
            if table.stamps_one[slot] != stamp:
                self._renew(np.array([slot]))
        self._came(row, alone, come)

    def _store_in_loop(self, row: int, packed_keys: bytes) -> None:
        table, ages, size = self.table, self._ages, len(packed_keys)
        table.grow(table.keys + size // KEY_BYTES)
        ages.begins(size // KEY_BYTES, 0, table.stamps)
        alone, at = self._sets.alone(row), 0
        while at < size:
            done = store_in_loop(table, self._sets, ages, row, packed_keys, at)
            if new := len(done.new):
                table.put(as_array(done.new), as_array(done.prints), alone, ages.stamp)
                self._came(row, alone, new)
            self.refused += done.refused
            at = done.at
            if at < size:
                (fingerprint,) = fingerprints_one_by_one(packed_keys[at : at + KEY_BYTES])
                table.insert_one(fingerprint, alone, ages.stamp)
                self._came(row, alone, 1)
                at += KEY_BYTES

    def _came(self, row: int, alone: int, keys: int) -> None:
        """So many new ones, which nobody else holds."""
        self._sets.keys_one[alone] += keys
        self._sets.held_one[row] += keys
        self._ages.came(keys)

    def _store_many(self, row: int, prints: NDArray[np.uint64]) -> None:
        table, sets = self.table, self._sets
        table.grow(min(self._keys_max, table.keys + len(prints)))
        slots = table.locate(prints)
        there = slots >= 0
        known = slots[there]
        over = table.keys + len(prints) - len(known) - self._keys_max
        self._ages.begins(len(prints), over + len(known) if over > 0 else 0, table.stamps)
        if len(known):
            known, prints = self._once(known), prints[~there]
            self._move(known, row, sets.extended, 1)
            self._renew(known)
        if over > 0:
            self._evict(over)
        if len(prints):
            alone = sets.alone(row)
            self._came(row, alone, table.insert(prints, alone, self._ages.stamp))

    def remove(self, row: int, packed_keys: bytes) -> None:
        """These are not held under the row any more."""
        table, sets = self.table, self._sets
        if self.in_loops:
            gone = remove_in_loop(table, sets, self._ages, row, packed_keys)
            if len(gone):
                table.free(as_array(gone))
            return
        if len(packed_keys) > _FEW_KEYS * KEY_BYTES:
            slots = table.locate(fingerprints(packed_keys))
            self._move(self._once(slots[slots >= 0]), row, sets.reduced, -1)
            return
        for fingerprint in fingerprints_one_by_one(packed_keys):
            slot = table.find(fingerprint)
            if slot < 0:
                continue
            number = table.set_ids_one[slot]
            after = sets.reduced(number, row)
            if after and after != number:
                table.set_ids_one[slot] = after
                sets.keys_one[number] -= 1
                sets.keys_one[after] += 1
                sets.held_one[row] -= 1
            elif not after:
                sets.forget_alike(number, 1)
                self._ages.counts_one[table.stamps_one[slot]] -= 1
                table.free_one(slot)

    def _move(self, slots: Slots, row: int, step: Callable[[int, int], int], change: int) -> None:
        """The keys in these slots, each there once, get sets with or without this row; ``change`` is 1 or -1."""
        table, sets = self.table, self._sets
        numbers = table.set_ids[slots].tolist()
        counts = Counter(numbers)
        steps = {number: step(number, row) for number in counts}
        for number, keys in counts.items():
            after = steps[number]
            if after and after != number:
                sets.keys_one[number] -= keys
                sets.keys_one[after] += keys
                sets.held_one[row] += change * keys
            elif change > 0 and not sets.masks[number] >> row & 1:
                self.refused += keys
        if len(steps) == 1:
            ((number, after),) = steps.items()
            if after and after != number:
                table.set_ids[slots] = after
            elif not after:
                self._free(slots)
            return
        afters = np.fromiter(map(steps.__getitem__, numbers), np.uint32, len(numbers))
        stay = afters > 0
        table.set_ids[slots[stay]] = afters[stay]
        self._free(slots[~stay])

    def _free(self, slots: Slots) -> Counter[int]:
        """Forget the keys there; returns how many of each set they were."""
        gone = self._sets.forget(self.table.set_ids[slots])
        self._ages.forget(self.table.stamps[slots])
        self.table.free(slots)
        return gone

    def _once(self, slots: Slots) -> Slots:
        """Each of them once: who writes its number there and reads another one is not the last of its kind."""
        set_ids = self.table.set_ids
        before, numbers = set_ids[slots], np.arange(len(slots), dtype=np.uint32)
        set_ids[slots] = numbers
        last = set_ids[slots] == numbers
        set_ids[slots] = before
        return slots if last.all() else slots[last]

    def used(self, slots: Slots) -> None:
        """The keys there, in the order of a prompt, were asked for."""
        if len(slots) and self.ages_at(int(slots[-1])):
            self._renew(slots)

    def ages_at(self, slot: int) -> bool:
        """Whether a prompt that was asked for and ends in this slot (-1: none) is to be renewed. Who asks for one
        renews all of it: if the end of it is new, so is the rest."""
        if slot < 0 or 2 * self.table.keys <= self._keys_max:
            return False
        return self.table.stamps_one[slot] != self._ages.stamp

    def renew(self, packed_keys: bytes, every: int) -> None:
        """The sample of these, which was found, is in use."""
        slots = self.table.locate(fingerprints(key_sample(packed_keys, every)))
        self._renew(slots[slots >= 0])

    def _renew(self, slots: Slots) -> None:
        """The keys there are in use."""
        stamps = self.table.stamps
        slots = slots[stamps[slots] != self._ages.stamp]
        if len(slots):
            slots = self._once(slots)
            self._ages.renew(stamps[slots])
            stamps[slots] = self._ages.stamp

    # -- the oldest go

    def _evict(self, over: int) -> None:
        """Forget at least so many keys of those that came first; some more, as finding them is what costs."""
        table, ages = self.table, self._ages
        left = min(over + min(_EVICT_KEYS, self._keys_max // EPOCHS), ages.before_present)
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

    def _push_out(self, slots: list[int]) -> int:
        ages = [(self._ages.stamp - self.table.stamps_one[slot]) % STAMPS for slot in slots]
        slot = slots[ages.index(max(ages))]
        self._count_evicted(self._free(np.array([slot])))
        return slot

    def _count_evicted(self, gone: Counter[int]) -> None:
        self.evicted += sum(keys * self.shown_of(number).bit_count() for number, keys in gone.items())

    # -- rows of the sets

    def new_row(self, bit: int) -> int:
        """For the holder with this bit."""
        row = next(row for row in count() if row not in self._owners)
        self._owners[row] = bit
        self._sets.add_row(row)
        return row

    def hide(self, row: int | None) -> None:
        """What was told under it is void."""
        if row is None:
            return
        self._shown = {0: 0}
        if not self._sets.held_one[row]:
            del self._owners[row]
            return
        self._owners[row] = 0
        self._void |= 1 << row
        self.collect(max(COLLECT_SLOTS, self.table.slots // _COLLECT_SHARE))

    def shown_of(self, number: int) -> int:
        """The bits of a set's holders."""
        shown = self._shown.get(number)
        if shown is None:
            shown = 0
            for row in self._sets.rows(number).tolist():
                shown |= self._owners[row]
            self._shown[number] = shown
        return shown

    def collect(self, slots_max: int = COLLECT_SLOTS) -> bool:
        """Look for void rows in at most so many slots, and clear them away. Returns whether more is left to be done."""
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
        """Returns whether that was done: not where it is too much at once."""
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
                sets.keys_one[number] -= keys
                sets.keys_one[after] += keys
        stay = afters > 0
        table.set_ids[slots[stay]] = afters[stay]
        self._free(slots[~stay])
        return True

    def check_integrity(self) -> None:
        """Assert that all books agree with the table (for tests and idle times)."""
        table, sets = self.table, self._sets
        slots = table.taken(0, table.slots)
        assert len(slots) == table.keys <= self._keys_max
        assert table.locate(table.print_of(slots)).tolist() == slots.tolist()
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
