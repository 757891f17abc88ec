"""The radix tree by hand: matches, splits of edges, and evictions from a full tree."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon_lab.policies.radix_tree import RadixTree
from tests.unit.batching.books import keys_of


def tree(*prompts: str, limit: int = 100) -> RadixTree:
    made = RadixTree(limit)
    for letters in prompts:
        made.insert(keys_of(letters))
    return made


def edges(made: RadixTree) -> list[str]:
    """Returns for each edge the last letters of its keys."""
    return sorted("".join(key.decode()[-1] for key in node.keys) for node in made.nodes()[1:])


def test_an_edge_is_split_where_somebody_branches_off_or_ends() -> None:
    assert edges(tree("abcd", "abxy")) == ["ab", "cd", "xy"]
    assert edges(tree("abcd", "ab")) == ["ab", "cd"]
    assert edges(tree("ab", "abcd")) == ["ab", "cd"]
    assert edges(tree("ab", "ab")) == ["ab"]


@pytest.mark.parametrize(
    ("asked", "known", "inside"), [("", 0, 0), ("x", 0, 0), ("a", 1, 1), ("abc", 3, 1), ("abcdef", 4, 2), ("abz", 2, 2)]
)
def test_the_longest_beginning_matches_within_an_edge_too(asked: str, known: int, inside: int) -> None:
    match = tree("abcd", "abxy").match(keys_of(asked))
    assert (match.keys, match.inside) == (known, inside)


def test_looking_splits_nothing() -> None:
    made = tree("abcd")
    made.match(keys_of("ab"))
    assert edges(made) == ["abcd"]


def test_a_full_tree_drops_the_least_recently_passed_end_first() -> None:
    made = tree("abcd", "abxy", "mnop", limit=10)
    assert made._keys == 10
    made.match(keys_of("abxy"))
    made.insert(keys_of("q"))  # the eleventh: 8 are kept at most
    # Without cd, 11 - 2 = 9 keys are left; then the less recently used of mnop and q goes: mnop.
    assert edges(made) == ["ab", "q", "xy"]


def test_of_more_than_the_limit_the_beginning_stays() -> None:
    made = tree("xy", "abcdef", limit=4)
    assert edges(made) == ["abcd"]


def test_it_holds_a_key_at_least() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        RadixTree(0)


@given(random=st.randoms(use_true_random=True), limit=st.integers(1, 30))
def test_it_never_holds_more_and_what_came_last_is_there(random: Random, limit: int) -> None:
    made = RadixTree(limit)
    for _ in range(30):
        letters = "".join(random.choice("ab") for _ in range(random.randint(1, 8)))
        made.insert(keys_of(letters))
        assert made._keys == sum(len(node.keys) for node in made.nodes()) <= limit
        assert made.match(keys_of(letters)).keys == min(len(letters), limit)
        for node in made.nodes()[1:]:
            assert node.parent is not None
            assert node.keys
            assert node.parent.children[node.keys[0]] is node


@given(random=st.randoms(use_true_random=True))
def test_it_matches_what_the_longest_common_beginning_is(random: Random) -> None:
    made, prompts = RadixTree(10_000), []
    for _ in range(20):
        prompts.append("".join(random.choice("ab") for _ in range(random.randint(0, 8))))
        made.insert(keys_of(prompts[-1]))
        asked = "".join(random.choice("ab") for _ in range(random.randint(0, 10)))
        assert made.match(keys_of(asked)).keys == sum(
            any(each.startswith(asked[:end]) for each in prompts) for end in range(1, len(asked) + 1)
        )
