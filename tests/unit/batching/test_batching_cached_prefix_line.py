"""SGLang's orders by hand: the longest match first, and through the tree in depth by weight."""

from __future__ import annotations

import pytest

from pinyon.batching import BATCHING_POLICIES, BatchingPolicy, BatchRequest
from tests.unit.batching.books import Books, keys_of


def request(number: int, letters: str) -> BatchRequest:
    return BatchRequest(number, 16 * len(letters), 1, keys_of(letters))


def policy(choice: str, *prompts: str, cached: tuple[str, ...] = ()) -> BatchingPolicy:
    """Returns a policy that has served the cached prompts; the other prompts wait, numbered from 0."""
    made = BATCHING_POLICIES.make(choice).policy(Books())
    for number, letters in enumerate(cached, start=-len(cached)):
        made.enqueue(request(number, letters))
        assert made.admit(1, 1, 0.0) == [number]
        made.remove(number)
    for number, letters in enumerate(prompts):
        made.enqueue(request(number, letters))
    return made


@pytest.mark.parametrize("name", ["lpm", "dfs_weight"])
def test_where_nothing_is_cached_they_enter_as_they_came(name: str) -> None:
    assert policy(name, "aa", "bb", "aa").admit(9, 9, 1.0) == [0, 1, 2]


def test_whose_match_is_longest_enters_first() -> None:
    """The prompts match 1, 4, 0, 3 and 4 blocks."""
    made = policy("lpm", "axxx", "abcd", "zzzz", "abcx", "abcde", cached=("abcd",))
    assert made.admit(9, 9, 1.0) == [1, 4, 3, 0, 2]


def test_what_was_just_admitted_is_cached_the_next_time() -> None:
    made = policy("lpm", "bb", "aa", "bb", "aa", cached=("aa",))
    assert made.admit(9, 1, 1.0) == [1]
    assert made.admit(9, 2, 2.0) == [3, 0]
    assert made.admit(9, 1, 3.0) == [2]


def test_at_one_time_the_order_stands_until_somebody_comes() -> None:
    made = policy("lpm", "bb", "aa", "bb", cached=("aa",))
    assert made.admit(9, 2, 1.0) == [1, 0]
    made.enqueue(request(3, "bb"))
    made.enqueue(request(4, "aab"))
    assert made.remove(2)
    assert made.admit(9, 9, 1.0) == [3, 4]


def test_many_waiting_prompts_enter_as_they_came_unless_disabled() -> None:
    prompts = ("bb", "aa", "bb")
    assert policy("lpm:fallback=2", *prompts, cached=("aa",)).admit(9, 9, 1.0) == [0, 1, 2]
    assert policy("lpm:fallback=3", *prompts, cached=("aa",)).admit(9, 9, 1.0) == [1, 0, 2]
    assert policy("lpm:fallback=0", *prompts, cached=("aa",)).admit(9, 9, 1.0) == [1, 0, 2]
    many = policy("lpm", *["bb"] * 128, "aa", cached=("aa",))
    assert many.admit(999, 1, 1.0) == [0]


def test_the_heaviest_branch_comes_first_and_in_it_the_deepest() -> None:
    """The tree has ab with cd and xy, and m. Requests: 0 at m, 1 at ab, 2 at ab-cd, 3 and 5 at ab-xy, 4 nowhere."""
    made = policy("dfs_weight", "m", "ab", "abcd", "abxy", "z", "abxyz", cached=("abcd", "abxy", "m"))
    assert made.admit(9, 9, 1.0) == [3, 5, 2, 1, 0, 4]


def test_of_equal_branches_the_longest_cached_comes_first() -> None:
    made = policy("dfs_weight", "bb", "aa", cached=("aa", "bb"))
    assert made.admit(9, 9, 1.0) == [1, 0]


@pytest.mark.parametrize("name", ["lpm", "dfs_weight"])
def test_a_preempted_request_comes_first_and_without_room_none(name: str) -> None:
    made = policy(name, "bb", "aa", cached=("aa",))
    assert made.admit(9, 0, 1.0) == []
    assert made.admit(9, 2, 1.0) == [1, 0]
    made.enqueue(request(2, "aa"))
    made.remove(0)
    made.enqueue(request(0, "bb"))
    assert made.admit(9, 9, 2.0) == [0, 2]


@pytest.mark.parametrize("name", ["lpm", "dfs_weight"])
def test_what_another_policy_admitted_is_cached_too(name: str) -> None:
    made = policy(name, "bb", "aa")
    made.adopt(request(-1, "aa"), 0.0)
    assert made.admit(9, 9, 1.0) == [1, 0]


@pytest.mark.parametrize("choice", ["lpm:fallback=-1", "lpm:tree_blocks=0", "dfs_weight:tree_blocks=0"])
def test_bounds(choice: str) -> None:
    with pytest.raises(ValueError, match="must be from"):
        BATCHING_POLICIES.make(choice)
