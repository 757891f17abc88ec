"""Rings: whose a key is depends on who is there, and on nothing else; who comes or goes moves only its own arcs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.placement.hash_ring import HashRing

KEYS = [number.to_bytes(16, "little") for number in range(4000)]
NODES = 128
NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=12, unique=True)


@given(NAMES, st.integers(0, (1 << 64) - 1), st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(names, seed, dice):
    ring, other = HashRing(names, 8, seed), HashRing(dice.sample(names, len(names)), 8, seed)
    assert all(ring.owner(key) == other.owner(key) for key in KEYS[:100])


@given(NAMES, st.integers(0, (1 << 64) - 1))
def test_one_more_takes_keys_for_itself_alone(names, seed):
    *before, newcomer = names
    ring, grown = HashRing(before, 8, seed), HashRing(names, 8, seed)
    for key in KEYS[:200]:
        assert grown.owner(key) in (ring.owner(key), newcomer)


@given(NAMES, st.integers(0, (1 << 64) - 1))
def test_the_next_other_one_is_what_is_left_when_one_goes(names, seed):
    ring, gone = HashRing(names, 8, seed), names[0]
    left = HashRing(names[1:], 8, seed)
    for key in KEYS[:200]:
        assert ring.owner(key, other_than=gone) == left.owner(key)
        assert ring.owner(key, other_than=gone) != gone


def test_nobody_else_is_there():
    assert HashRing(["a"], NODES, 0).owner(KEYS[0]) == "a"
    assert HashRing(["a"], NODES, 0).owner(KEYS[0], other_than="a") is None


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_about_equal_and_so_is_what_moves(seed):
    names = [f"instance-{number}" for number in range(8)]
    ring, grown = HashRing(names, NODES, seed), HashRing([*names, "newcomer"], NODES, seed)
    owners = [ring.owner(key) for key in KEYS]
    fair = len(KEYS) / len(names)
    assert all(0.6 * fair < owners.count(name) < 1.5 * fair for name in names)
    moved = sum(grown.owner(key) != owner for key, owner in zip(KEYS, owners, strict=True))
    assert moved == sum(grown.owner(key) == "newcomer" for key in KEYS)
    assert 0.6 * len(KEYS) / 9 < moved < 1.5 * len(KEYS) / 9


def test_two_seeds_are_two_independent_rings():
    names = [f"instance-{number}" for number in range(8)]
    one, two = HashRing(names, NODES, 1), HashRing(names, NODES, 2)
    same = sum(one.owner(key) == two.owner(key) for key in KEYS)
    assert 0.5 * len(KEYS) / 8 < same < 2 * len(KEYS) / 8
