"""The table of keys against a dict, with keys that all want the same few buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from librt.vecs import vec
from mypy_extensions import i64

from pinyon.placement import key_table
from pinyon.placement.key_table import SLOTS, KeyTable, Marks, fingerprints, fingerprints_one_by_one

PRINTS = st.builds(
    lambda first, second, own: (second << 32 | own << 8 | first) + 1,
    st.sampled_from((0, 1, 2, 128)), st.sampled_from((0, 1, 64)), st.integers(0, 3),
)  # fmt: skip
MANY = st.lists(st.one_of(PRINTS, st.integers(1, 2**64 - 1)), max_size=60)
STEPS = st.lists(st.tuples(st.sampled_from(("insert", "one", "free", "grow")), MANY), max_size=12)


def array(prints) -> np.ndarray:
    return np.array(list(prints), np.uint64)


class Books:
    """What should be in the table: by fingerprint its set and its stamp."""

    def __init__(self, keys_max: int) -> None:
        self.known: dict[int, tuple[int, int]] = {}
        self.pushed_out = 0
        self.table = KeyTable(keys_max, self.push_out)

    def push_out(self, slots: list[int]) -> int:
        assert len(slots) == 2 * SLOTS
        slot = slots[len(self.known) % len(slots)]
        (gone,) = self.table.print_of(np.array([slot])).tolist()
        self.table.free(np.array([slot]))
        self.known.pop(gone, None)
        self.pushed_out += 1
        return slot

    def insert(self, prints: list[int], set_id: int, stamp: int) -> None:
        new = [each for each in prints if each not in self.known]
        self.known.update(dict.fromkeys(new, (set_id, stamp)))
        before = self.pushed_out
        inserted = self.table.insert(array(new), set_id, stamp)
        if self.pushed_out == before:
            assert inserted == len(set(new))
            return
        # One that is in the call twice, and was pushed out between, came a second time.
        for each in set(new) - self.known.keys():
            if self.table.find(each) >= 0:
                self.known[each] = (set_id, stamp)

    def insert_one(self, prints: list[int], set_id: int, stamp: int) -> None:
        for each in prints:
            if each not in self.known:
                self.known[each] = (set_id, stamp)
                self.table.insert_one(each, set_id, stamp)

    def free(self, prints: list[int]) -> None:
        slots = self.table.locate(array(set(prints)))
        assert (slots >= 0).sum() == len(self.known.keys() & set(prints))
        self.table.free(slots[slots >= 0])
        for each in prints:
            self.known.pop(each, None)

    def check(self) -> None:
        table = self.table
        if self.pushed_out:  # what came in one call with those that went may be among them
            taken = table.taken(0, table.slots)
            there = set(table.print_of(taken).tolist())
            assert len(there) == len(taken) == table.keys
            assert there <= self.known.keys()
            self.known = {each: self.known[each] for each in there}
        assert table.keys == len(self.known)
        slots = table.locate(array(self.known)).tolist()
        assert slots == [table.find(each) for each in self.known]
        assert len(set(slots)) == len(self.known)
        assert [(table.set_ids_one[slot], table.stamps_one[slot]) for slot in slots] == list(self.known.values())

    def check_together(self, prints: list[int]) -> None:
        """Those that are there and others."""
        count, table = len(prints), self.table
        slots, numbers = vec[i64]([-2] * (count + 1)), vec[i64]([-2] * (count + 1))
        table.find_together(vec[i64]([each - (each >> 63 << 64) for each in prints] + [0]), count, slots, numbers)
        found = [table.find(each) for each in prints]
        assert list(slots) == [*found, -2], "no more than were asked for"
        assert list(numbers) == [*(0 if slot < 0 else table.set_ids_one[slot] for slot in found), -2]


@pytest.mark.parametrize(("keys_max", "reserved"), [(48, 1 << 24), (5000, 1 << 24), (5000, 2)])
@given(steps=STEPS)
def test_it_is_a_dict(keys_max, reserved, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_table, "BUCKETS_MIN", 2)
        patch.setattr(key_table, "_RESERVED_BUCKETS_MAX", reserved)
        patch.setattr(key_table, "_SMALL", 16)
        books = Books(keys_max)
        for number, (step, prints) in enumerate(steps):
            if step == "insert":
                books.insert(prints, number + 1, number)
            elif step == "one":
                books.insert_one(prints, number + 1, number)
            elif step == "free":
                books.free(prints)
            else:
                books.table.grow(len(books.known) + len(prints))
            books.check()
            books.check_together([*books.known, *prints])


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=20))
def test_fingerprints_are_the_same_one_by_one(keys):
    packed = b"".join(keys)
    assert fingerprints(packed).tolist() == list(fingerprints_one_by_one(packed))


def test_small_numbers_are_spread_like_random_keys():
    """Keys of simulations: any half of the key, either way round."""
    for order, shift in (("little", 0), ("big", 0), ("little", 8)):
        packed = b"".join((number << 8 * shift).to_bytes(16, order) for number in range(1, 5000))
        prints = fingerprints(packed)
        assert len(set(prints.tolist())) == 4999
        for half in (prints & np.uint64(0xFF), prints >> np.uint64(32) & np.uint64(0xFF)):
            assert np.bincount(half.astype(np.int64), minlength=256).max() < 60


@pytest.mark.parametrize("keys_max", [10_000, 100_000])
def test_a_table_of_random_keys_takes_all_it_may(keys_max):
    pushed_out = []
    table = KeyTable(keys_max, pushed_out.append)
    dice = np.random.default_rng(1)
    for start in range(0, keys_max, 500):
        table.grow(start + 500)
        assert table.insert(dice.integers(1, 2**63, 500).astype(np.uint64), 1, 0) == 500
    assert (table.keys, pushed_out) == (keys_max, [])


@given(st.lists(st.tuples(st.one_of(st.integers(0, 20), st.integers(0, 2**30)), st.integers(1, 9)), max_size=50))
def test_marks_are_kept_as_in_a_dict(added):
    marks, known = Marks(len(added)), {}
    for slot, number in added:
        assert marks.add(slot, number) == (slot not in known)
        known.setdefault(slot, number)
    assert {slot: marks.of(slot) for slot in known} == known
    assert marks.of(2**31) == 0
