"""The table of keys against a dict, with keys that all map to the same few buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from librt.vecs import vec
from mypy_extensions import i64

from pinyon.placement import key_table
from pinyon.placement.key_table import CROWDED, SLOTS, THERE, KeyTable, read_prints

PRINTS = st.builds(
    lambda first, second, own: (second << 32 | own << 8 | first) + 1,
    st.sampled_from((0, 1, 2, 128)), st.sampled_from((0, 1, 64)), st.integers(0, 3),
)  # fmt: skip
MANY = st.lists(st.one_of(PRINTS, st.integers(1, 2**63 - 1), st.integers(-(2**63), -1)), max_size=60)
STEPS = st.lists(st.tuples(st.sampled_from(("insert", "free", "grow")), MANY), max_size=12)


def found(table: KeyTable, prints: list[int]) -> list[int]:
    """Returns the slots of the fingerprints; checks that each set number is that of its slot."""
    count = len(prints)
    slots, numbers = vec[i64]([-2] * (count + 1)), vec[i64]([-2] * (count + 1))
    table.find(vec[i64]([*prints, 0]), count, slots, numbers)
    assert (slots[count], numbers[count]) == (-2, -2), "no more than were asked for"
    assert list(numbers)[:count] == [0 if slot < 0 else table.set_ids[slot] for slot in list(slots)[:count]]
    return list(slots)[:count]


def insert(table: KeyTable, print_: int, set_id: int, stamp: int) -> None:
    if table.insert(print_, set_id, stamp) == CROWDED:
        table.make_room(print_)
        assert table.insert(print_, set_id, stamp) >= 0
    assert table.insert(print_, 0, 0) == THERE


def prints_of(packed: bytes) -> list[int]:
    prints = vec[i64]([0] * (len(packed) // 16))
    assert read_prints(packed, 0, prints) == len(prints)
    return list(prints)


class Books:
    """The expected content of the table: by fingerprint its set and its stamp."""

    def __init__(self, keys_max: int) -> None:
        self.known: dict[int, tuple[int, int]] = {}
        self.table = KeyTable(keys_max, self.push_out)

    def push_out(self, slots: list[int]) -> None:
        assert len(slots) == 2 * SLOTS
        slot = slots[len(self.known) % len(slots)]
        (gone,) = self.table.print_of(np.array([slot])).tolist()
        self.table.free(np.array([slot]))
        del self.known[gone]

    def insert(self, prints: list[int], set_id: int, stamp: int) -> None:
        for each in prints:
            if each not in self.known:
                insert(self.table, each, set_id, stamp)
                self.known[each] = (set_id, stamp)

    def free(self, prints: list[int]) -> None:
        slots = np.array([slot for slot in found(self.table, sorted({*prints})) if slot >= 0], np.int64)
        assert len(slots) == len(self.known.keys() & {*prints})
        self.table.free(slots[1:])
        for slot in slots[:1].tolist():
            self.table.remove(slot)
        for each in prints:
            self.known.pop(each, None)

    def check(self) -> None:
        table = self.table
        assert table.keys == len(self.known)
        slots = found(table, [*self.known])
        assert len(set(slots)) == len(self.known)
        assert -1 not in slots
        assert [(table.set_ids[slot], table.stamps[slot]) for slot in slots] == list(self.known.values())
        assert [(table.set_at(slot), table.stamp_at(slot)) for slot in slots] == list(self.known.values())


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
            elif step == "free":
                books.free(prints)
            else:
                books.table.grow(len(books.known) + len(prints))
            books.check()
            there = found(books.table, prints)
            assert [slot >= 0 for slot in there] == [each in books.known for each in prints]


@given(st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=20))
def test_keys_have_fingerprints_of_their_own(keys):
    prints = prints_of(b"".join(keys))
    assert len({*prints}) == len(keys)
    assert all(-(2**63) <= each < 2**63 and each for each in prints)


def test_small_numbers_are_spread_like_random_keys():
    """Keys of simulations: any half of the key, in either order."""
    for order, shift in (("little", 0), ("big", 0), ("little", 8)):
        packed = b"".join((number << 8 * shift).to_bytes(16, order) for number in range(1, 5000))
        prints = prints_of(packed)
        assert len({*prints}) == 4999
        for shift_to in (0, 32):
            halves = [each >> shift_to & 0xFF for each in prints]
            assert np.bincount(halves, minlength=256).max() < 60


@pytest.mark.parametrize("keys_max", [10_000, 100_000])
def test_a_table_of_random_keys_takes_all_it_may(keys_max):
    pushed_out = []
    table = KeyTable(keys_max, pushed_out.append)
    dice = np.random.default_rng(1)
    for start in range(0, keys_max, 500):
        table.grow(start + 500)
        for each in dice.integers(1, 2**63, 500).tolist():
            insert(table, each, 1, 0)
    assert (table.keys, pushed_out) == (keys_max, [])
