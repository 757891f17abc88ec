"""Groups by hand: the requests that are admitted, and those that a step decodes."""

from __future__ import annotations

import pytest

from pinyon.batching import BATCHING_POLICIES, BatchRequest
from pinyon.batching.rounds import BATCHES_MAX, Formed
from pinyon_lab.policies.group_rounds import GroupRounds
from tests.unit.batching.books import Books, keys_of


def request(number: int, letters: str) -> BatchRequest:
    return BatchRequest(number, 16 * len(letters), 1, keys_of(letters), len(letters))


def rounds(*groups: int) -> GroupRounds:
    """Returns rounds with requests 0, 1, ... of these groups; group 0 means none."""
    made = GroupRounds(4)
    for number, group in enumerate(groups):
        made.add(number, (group, 100 + number) if group else ())
    return made


def steps(made: GroupRounds, count: int) -> list[list[int]]:
    taken = []
    for _ in range(count):
        taken.append(made.next())
        made.done()
    return taken


def test_the_running_groups_come_first_whatever_else_is_shared() -> None:
    """The first block alone decides: the blocks behind it make no difference."""
    policy = BATCHING_POLICIES.make("oracle:group_blocks=1").policy(Books())
    for number, letters in enumerate(("abcd", "xbcd", "azzz", "abcd", "xbcd")):
        policy.enqueue(request(number, letters))
    assert policy.admit(9, 9, 0.0) == [0, 2, 3, 1, 4]


def test_each_group_is_a_batch_the_largest_first() -> None:
    made = rounds(7, 8, 8, 7, 8, 0, 9)
    assert steps(made, 4) == [[1, 2, 4], [0, 3], [5], [6]]
    assert steps(made, 1) == [[1, 2, 4]]


def test_the_batch_stays_until_its_step_is_done() -> None:
    made = rounds(7, 8, 8)
    assert made.next() == made.next() == [1, 2]
    made.remove(1)
    assert made.next() == [2]
    made.done()
    assert made.next() == [0]


def test_who_comes_enters_his_group_and_a_new_one_the_next_round() -> None:
    made = rounds(7, 7, 8)
    assert steps(made, 1) == [[0, 1]]
    made.add(3, (8,))
    made.add(4, (9,))
    assert steps(made, 1) == [[2, 3]]
    assert steps(made, 3) == [[0, 1], [2, 3], [4]]


def test_the_last_batch_is_of_all_groups_that_are_left() -> None:
    made = rounds(*[each for group in range(1, BATCHES_MAX + 3) for each in (group, group)])
    taken = steps(made, BATCHES_MAX)
    assert [len(batch) for batch in taken] == [2] * (BATCHES_MAX - 1) + [6]
    assert sorted(number for batch in taken for number in batch) == list(range(2 * BATCHES_MAX + 4))


def test_what_is_to_be_known_of_a_batch() -> None:
    """All requests of a group share one of its two levels; of a mixed batch nothing is known."""
    made = rounds(7, 7, 0)
    assert made.formed == Formed()
    made.next()
    assert made.formed == Formed(2, 2, 4, 0.5)
    made.done()
    made.next()
    assert made.formed == Formed(2, 1, 0, 0.0)


def test_without_anybody_there_is_no_batch() -> None:
    made = rounds(7)
    made.remove(0)
    made.remove(0)
    assert made.next() == []


@pytest.mark.parametrize("option", ["group_blocks=0", "group_blocks=4097", "passed_over_s=-1"])
def test_bounds(option: str) -> None:
    with pytest.raises(ValueError, match="must be from"):
        BATCHING_POLICIES.make(f"oracle:{option}")
