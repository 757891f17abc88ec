"""The block index: prefixes, sequence gaps, limits."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from pinyon.placement.index import COLLECT_SLOTS, BlockIndex, Intake
from pinyon.placement.prefix_match import PrefixMatch
from tests.on_compiled import REPLACES_METHODS
from tests.unit.placement.conftest import keys


class Member(NamedTuple):
    bit: int


A, B, C, NOBODY = (Member(bit) for bit in (1, 2, 4, 8))


def leading(match: PrefixMatch) -> dict[Member, int]:
    return {member: blocks for member in (A, B, C) if (blocks := match.held_by(member))}


def extent(match: PrefixMatch, first: int, sources: Iterable[Member]) -> int:
    return match.extent(first, sum(member.bit for member in sources))


@pytest.fixture
def index():
    index = BlockIndex(1000)
    for member in (A, B, C):
        assert index.add() == member.bit
        index.apply_snapshot(member, 0, b"", first=True, last=True)
    return index


def test_the_prefix_of_each_holder_in_one_walk(index):
    index.apply_delta(A, 1, keys(1, 2, 3, 4), b"")
    index.apply_delta(B, 1, keys(1, 2), b"")
    index.apply_delta(C, 1, keys(1, 3, 4), b"")
    match = index.match(keys(1, 2, 3, 4, 5, 6))
    assert match.blocks == 4
    assert leading(match) == {A: 4, B: 2, C: 1}
    assert [extent(match, first, [A]) for first in range(5)] == [4, 4, 4, 4, 4]
    assert [extent(match, first, [B]) for first in range(5)] == [2, 2, 2, 3, 4]
    assert [extent(match, first, [C]) for first in range(5)] == [1, 1, 4, 4, 4]


def test_several_holders_together_reach_further_than_each(index):
    index.apply_delta(A, 1, keys(1, 2), b"")
    index.apply_delta(B, 1, keys(3), b"")
    index.apply_delta(C, 1, keys(4), b"")
    match = index.match(keys(1, 2, 3, 4, 5))
    assert match.blocks == 4
    assert leading(match) == {A: 2}
    assert extent(match, 0, [A, B]) == 3
    assert extent(match, 0, [B]) == 0
    assert extent(match, 2, [B, C]) == 4
    assert extent(match, 1, [A, C]) == 2
    assert extent(match, 4, [A, B, C]) == 4
    spans = match.spans(0, 4, A.bit | B.bit | C.bit, 10)
    assert spans == [(0, 2, A.bit), (2, 3, B.bit), (3, 4, C.bit)]


@pytest.mark.parametrize("spans_max", [None, 64])
def test_readers_without_blocks_cost_one_look_at_many_pieces(spans_max):
    """A conversation of a thousand short turns has as many pieces, and there are hundreds of readers."""

    class Counting(list):
        looks = 0

        def __getitem__(self, index):
            Counting.looks += 1
            return super().__getitem__(index)

    pieces = 1000
    match = PrefixMatch(Counting((block, (A, B)[block % 2].bit) for block in range(pieces)), pieces)
    sources = A.bit | B.bit | C.bit
    far = pieces if spans_max is None else spans_max
    assert match.extent(0, sources, spans_max) == far
    looks = Counting.looks
    for number in range(4, 100):
        assert match.extent(0, sources & ~(1 << number), spans_max) == far
    assert Counting.looks == looks
    assert match.extent(1, sources & ~A.bit, spans_max) == 2, "one that holds a part is told of what others hold"
    assert match.extent(0, B.bit, spans_max) == 0


@REPLACES_METHODS
def test_a_cold_prompt_costs_one_lookup(index, monkeypatch):
    looked_up, table = [], index._holdings.table
    find = table.find
    monkeypatch.setattr(
        table, "find", lambda prints, count, *found: looked_up.append(count) or find(prints, count, *found)
    )
    assert index.match(keys(*range(1000))).blocks == 0
    assert looked_up == [1]


def test_only_keys_within_the_limit_count(index):
    index.apply_delta(A, 1, keys(*range(200)), b"")
    assert leading(index.match(keys(*range(200)), 150)) == {A: 150}
    assert index.match(keys(*range(200)), 0).blocks == 0
    assert index.match(keys(*range(200)), 1000).blocks == 200
    assert index.match(b"").blocks == 0


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 128, 129, 130, 200])
def test_runs_that_end_anywhere_around_the_walks_steps(index, length):
    index.apply_delta(A, 1, keys(*range(length)), b"")
    index.apply_delta(B, 1, keys(*range(length // 2)), b"")
    match = index.match(keys(*range(300)))
    assert leading(match) == ({A: length, B: length // 2} if length > 1 else {A: 1})
    assert match.blocks == length


def test_stored_is_applied_before_removed(index):
    index.apply_delta(A, 1, keys(1, 2), keys(2))
    assert leading(index.match(keys(1, 2))) == {A: 1}
    index.apply_delta(A, 2, b"", keys(1, 7))
    assert len(index) == 0
    assert index.entries == 0


def test_a_gap_asks_once_and_only_a_snapshot_continues(index):
    assert index.apply_delta(A, 1, keys(1), b"") is Intake.APPLIED
    assert index.apply_delta(A, 3, keys(3), b"") is Intake.GAP
    assert index.apply_delta(A, 4, keys(4), b"") is Intake.IGNORED
    assert index.seq_of(A) == 1
    assert leading(index.match(keys(1))) == {A: 1}, "what was known is still a good hint"
    assert index.apply_snapshot(A, 4, keys(2), first=True, last=False) is Intake.APPLIED
    assert leading(index.match(keys(1))) == {A: 1}, "until the snapshot is complete"
    assert index.apply_snapshot(A, 4, keys(3), first=False, last=True) is Intake.APPLIED
    assert index.match(keys(1)).blocks == 0, "the last part voids what no part named"
    index.check_integrity()
    assert index.apply_delta(A, 5, keys(4), b"") is Intake.APPLIED
    assert leading(index.match(keys(2, 3, 4))) == {A: 3}


def test_a_repeated_change_is_a_gap(index):
    index.apply_delta(A, 1, keys(1), b"")
    assert index.apply_delta(A, 1, keys(2), b"") is Intake.GAP


def test_changes_before_any_snapshot_are_a_gap():
    index = BlockIndex(10)
    index.add()
    assert index.apply_delta(A, 1, keys(1), b"") is Intake.GAP
    assert index.apply_snapshot(A, 5, keys(1), first=False, last=True) is Intake.IGNORED


def test_changes_between_the_parts_of_a_snapshot_are_a_gap():
    index = BlockIndex(10)
    index.add()
    index.apply_snapshot(A, 5, keys(1), first=True, last=False)
    assert index.apply_delta(A, 6, keys(2), b"") is Intake.GAP
    assert index.apply_snapshot(A, 5, keys(3), first=False, last=True) is Intake.IGNORED


def test_parts_of_different_snapshots_do_not_mix(index):
    index.apply_snapshot(A, 5, keys(1), first=True, last=False)
    assert index.apply_snapshot(A, 6, keys(2), first=False, last=True) is Intake.GAP


def test_a_new_session_continues_by_snapshot_only(index):
    index.apply_delta(A, 1, keys(1), b"")
    index.new_session(A)
    assert leading(index.match(keys(1))) == {A: 1}
    assert index.apply_delta(A, 2, keys(2), b"") is Intake.GAP


def test_dropping_a_holder_leaves_nothing_of_it(index):
    index.apply_delta(A, 1, keys(1, 2), b"")
    index.apply_delta(B, 1, keys(2), b"")
    index.drop(A)
    assert index.match(keys(1)).blocks == 0
    assert leading(index.match(keys(2))) == {B: 1}
    index.check_integrity()
    assert index.add() == A.bit, "a free bit is used again"
    assert index.blocks_of(A) == 0
    assert index.add() == NOBODY.bit, "one that is in use is not"


def test_a_full_index_forgets_the_oldest_keys_and_counts_them():
    index = BlockIndex(3)
    assert index.add() == A.bit
    assert index.add() == B.bit
    index.apply_snapshot(A, 0, keys(1, 2, 3, 4, 5), first=True, last=True)
    assert (len(index), index.evicted) == (3, 2)
    assert leading(index.match(keys(1, 2, 3, 4))) == {A: 3}, "of too many at once, the first ones: prefixes"
    assert index.apply_delta(A, 1, b"", keys(5, 1)) is Intake.APPLIED
    assert len(index) == 2
    index.apply_snapshot(B, 0, keys(6, 2), first=True, last=True)
    assert len(index) == 3, "a key is one whoever holds it"
    index.apply_delta(B, 1, keys(7), b"")
    assert index.match(keys(3)).blocks == 0, "the oldest: another one was stored again since"
    assert leading(index.match(keys(2))) == {A: 1, B: 1}
    assert leading(index.match(keys(6, 7))) == {B: 2}
    index.apply_delta(B, 2, keys(8, 9), b"")
    assert leading(index.match(keys(8, 9))) == {B: 2}, "what is new is never refused"
    assert (len(index), index.evicted) == (3, 6)
    index.check_integrity()


def test_of_a_full_index_what_is_asked_for_stays(index):
    index.apply_delta(A, 1, keys(*range(900)), b"")
    for seq in range(1, 30):
        assert leading(index.match(keys(*range(20)))) == {A: 20}
        index.apply_delta(B, seq, keys(*range(1000 * seq, 1000 * seq + 100)), b"")
        assert index.entries <= 1000
    assert leading(index.match(keys(*range(900)))) == {A: 20}
    assert index.evicted > 1900
    index.check_integrity()


@pytest.mark.parametrize("churn", [0, 200, 256, 300, 1000])
def test_the_oldest_goes_however_long_it_was_there(churn):
    """The index tells ages apart for a while; blocks older than that stay the oldest."""
    index = BlockIndex(64)
    assert index.add() == A.bit
    index.apply_snapshot(A, 0, keys(0), first=True, last=True)
    for number in range(churn):
        index.apply_delta(A, number + 1, keys(1000 + number), keys(1000 + number))
    index.check_integrity()
    for number in range(1, 65):
        index.apply_delta(A, churn + number, keys(number), b"")
    assert index.match(keys(0)).blocks == 0
    assert all(index.match(keys(number)).blocks for number in range(2, 65)), "some more than one go together"
    index.check_integrity()


def test_keys_evicted_while_they_are_cleared_away_or_confirmed(index):
    index.apply_delta(A, 1, keys(*range(900)), b"")
    index.apply_snapshot(A, 1, keys(0, 1), first=True, last=False)
    index.apply_delta(B, 1, keys(*range(2000, 2999)), b"")
    assert index.apply_snapshot(A, 1, keys(2, 3), first=False, last=True) is Intake.APPLIED
    while index.collect(10):
        index.check_integrity()
    index.check_integrity()
    assert index.entries <= 1000
    assert index.match(keys(4)).blocks == 0


# -- clearing away


def big_index(count: int) -> BlockIndex:
    index = BlockIndex(10 * count)
    for member in (A, B):
        assert index.add() == member.bit
    index.apply_snapshot(A, 0, keys(*range(count)), first=True, last=True)
    index.apply_snapshot(B, 0, keys(*range(10)), first=True, last=True)
    return index


def test_a_dropped_holder_is_gone_at_once_but_cleared_in_parts():
    count = 5 * COLLECT_SLOTS
    index = big_index(count)
    index.drop(A)
    assert len(index) >= count - COLLECT_SLOTS, "one portion at most is cleared at once"
    assert index.entries == 10
    match = index.match(keys(*range(20)))
    assert (leading(match), match.blocks) == ({B: 10}, 10)
    assert index.match(keys(15)).blocks == 0
    assert index.add() == A.bit, "its bit is free, and the next one has nothing of it"
    assert index.match(keys(15)).blocks == 0
    portions, before = 0, len(index)
    while index.collect():
        assert 0 < before - len(index) <= COLLECT_SLOTS
        before = len(index)
        portions += 1
    assert portions >= 3
    assert len(index) == 10
    index.check_integrity()


def test_a_snapshot_clears_what_it_does_not_name_in_portions():
    count = 5 * COLLECT_SLOTS
    index = big_index(count)
    assert index.apply_snapshot(A, 0, keys(*range(5)), first=True, last=True) is Intake.APPLIED
    assert index.blocks_of(A) == 5
    assert len(index) >= count - COLLECT_SLOTS
    index.apply_delta(A, 1, keys(5, 6), keys(0))
    while index.collect():
        index.check_integrity()
    assert len(index) == 10
    assert leading(index.match(keys(1, 2, 3, 4, 5, 6, 7))) == {A: 6, B: 7}
    assert leading(index.match(keys(0))) == {B: 1}
    index.check_integrity()


def test_a_holder_dropped_while_it_is_being_cleared():
    count = 3 * COLLECT_SLOTS
    index = big_index(count)
    index.apply_snapshot(A, 0, keys(*range(5)), first=True, last=True)
    index.apply_snapshot(A, 0, keys(*range(100, 200)), first=True, last=False)
    index.drop(A)
    assert leading(index.match(keys(*range(20)))) == {B: 10}
    while index.collect():
        index.check_integrity()
    assert (len(index), index.entries) == (10, 10)
    assert index.add() == A.bit


def test_a_change_in_parts(index):
    assert index.apply_delta(A, 1, keys(1, 2), b"") is Intake.APPLIED
    assert index.apply_delta(A, 1, keys(3), keys(2), more=True) is Intake.APPLIED
    assert index.seq_of(A) == 1
    assert leading(index.match(keys(1, 2))) == {A: 1}
    assert index.apply_delta(A, 2, keys(2), b"", more=True) is Intake.GAP
