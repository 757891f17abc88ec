"""Hash rings: a key's owner depends only on the members, and a member that comes or goes moves only its own arcs."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.hash_ring import ABSENT_MAX, HashRing, lower_bound
from pinyon.core.request import Role
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.pairs import PoolRings
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.on_compiled import REPLACES_METHODS
from tests.unit.placement.conftest import info, keys, make_fleet

KEYS = [number.to_bytes(16, "little") for number in range(4000)]
NODES = 128
STEP = 0x9E3779B97F4A7C15
NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=12, unique=True)


def mixed(state: int) -> int:
    """Returns the mixed state, computed as docs/design/placement.md says."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def owner_by_the_docs(names: list[str], count: int, seed: int, key: bytes) -> str:
    """Returns the nearest clockwise owner of all points, each computed on its own."""
    digest = xxhash.xxh3_64_intdigest
    points = [
        (mixed((digest(name.encode(), seed) + number * STEP) % 2**64), name)
        for name in names
        for number in range(1, count + 1)
    ]
    at = digest(key, seed)
    return min(points, key=lambda point: ((point[0] - at) % 2**64, point[1]))[1]


@given(NAMES, st.integers(0, (1 << 64) - 1))
def test_points_are_where_the_docs_say(names, seed):
    ring = HashRing(names, 8, seed)
    for key in KEYS[:20]:
        assert ring.owner(key) == owner_by_the_docs(names, 8, seed, key)


def test_points_of_one_member():
    """The values, behind SplitMix64's own test vector, are the same in every build and on every machine."""
    assert [f"{mixed(number * STEP % 2**64):x}" for number in (1, 2)] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4"]
    ring = HashRing(["prefill-0"], 2, 7)
    assert [f"{int(at):016x}" for at in ring._at] == ["ccdcc878237a9ee9", "e430d17450556626"]


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


@given(NAMES, st.data(), st.integers(0, (1 << 64) - 1))
def test_among_some_it_is_as_if_nobody_else_was_there(names, data, seed):
    some = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    ring, left = HashRing(names, 8, seed), HashRing(some, 8, seed)
    for key in KEYS[:100]:
        first = ring.owner(key, among=some)
        assert first == left.owner(key)
        assert ring.owner(key, other_than=first, among=some) == left.owner(key, other_than=first)


@given(NAMES, st.data(), st.integers(0, (1 << 64) - 1))
def test_a_ring_that_changed_is_the_one_of_who_is_there(names, data, seed):
    first = data.draw(st.lists(st.sampled_from(names), unique=True))
    gone = data.draw(st.lists(st.sampled_from(first), unique=True)) if first else []
    ring = HashRing(first, 8, seed)
    ring.change([name for name in names if name not in first], gone)
    fresh = HashRing([name for name in names if name not in gone], 8, seed)
    assert sorted(ring.members) == sorted(fresh.members)
    assert all(ring.owner(key) == fresh.owner(key) for key in KEYS[:100])


@REPLACES_METHODS
@pytest.mark.parametrize("policy", ["dualmap", "cache_affinity"])
def test_a_policy_makes_no_ring_anew(policy, monkeypatch):
    """The ring is kept for alternating requests of two models, and for requests that some instances cannot take."""
    fleet = make_fleet(*((f"i{number}", Role.MIXED) for number in range(4)))
    for number in range(3):
        fleet.join(info(f"small{number}", Role.MIXED, max_context_tokens=64), 0.0)
        fleet.join(info(f"o{number}", Role.MIXED, model="o"), 0.0)
    added: list[str] = []
    change = HashRing.change

    def counted(self, new, gone):
        new = list(new)
        added.extend(new)
        change(self, new, gone)

    monkeypatch.setattr(HashRing, "change", counted)
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make(policy))
    rings = 2 if policy == "dualmap" else 1
    for turn in range(30):
        model, tokens = ("m", "o", "m")[turn % 3], 40 if turn % 2 else 400
        exclude = frozenset({f"i{turn % 4}"} if turn % 5 == 0 else ())
        request = PlacementRequest(f"r{turn}", model, tokens, keys(turn, 1000 + turn), exclude=exclude)
        placed = scheduler.decide(request, float(turn)).prefill.info
        assert placed.model == model
        assert placed.instance_id not in exclude
        assert tokens == 40 or not placed.instance_id.startswith("small")
        if turn == 10:
            assert len(added) == rings * 10
            fleet.join(info("late", Role.MIXED), 0.0)
        if turn == 20:
            fleet.leave("i1")
    assert len(added) == rings * 11


def test_who_left_for_good_goes_from_a_ring_in_the_end():
    fleet, rings = make_fleet(("i0", Role.MIXED)), PoolRings(4, (1, 2), HotnessSettings())
    for number in range(100):
        fleet.join(info(f"i{number + 1}", Role.MIXED), 0.0)
        fleet.leave(f"i{number}")
        one, two = rings.of(fleet.pools("m")[0]).rings
        assert f"i{number + 1}" in one.members
        assert list(one.members) == list(two.members)
        assert len(one.members) <= 2 + ABSENT_MAX


def test_rings_of_so_many_models_are_kept():
    fleet, rings = make_fleet(), PoolRings(4, (1,), HotnessSettings(), groups_max=2)
    for model in "abc":
        fleet.join(info(model, Role.MIXED, model=model), 0.0)
    found = []
    for model in "abacab":
        found.append(rings.of(fleet.pools(model)[0]))
        assert list(found[-1].rings[0].members) == [model]
        assert len(rings._of_group) <= 2
    first, second, *_ = found
    assert second is not first is found[2] is found[4]
    assert second is not found[5], "the one that was asked longest ago went"
    assert second.tree is not first.tree


@given(NAMES, st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=40))
def test_equal_points_belong_to_the_first_name_however_they_came(names, changes):
    digest = xxhash.xxh3_64_intdigest

    def few(data, seed=0):
        """Returns digests from which the points of several members overlap; keys lie at such points."""
        state = digest(data, seed) % 16 * STEP % 2**64
        return mixed(state) if len(data) == 16 else state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xxhash, "xxh3_64_intdigest", few)
        ring = HashRing(names, 8, 1)
        for place, comes in changes:
            name = names[place % len(names)]
            if comes != (name in ring.members):
                ring.change([name] if comes else [], [] if comes else [name])
            fresh = HashRing(ring.members, 8, 1)
            assert [ring.owner(key) for key in KEYS[:40]] == [fresh.owner(key) for key in KEYS[:40]]
            assert all((ring.owner(key) is None) == (not ring.members) for key in KEYS[:2])


def test_a_new_ring_hashes_each_member_once(monkeypatch):
    """The number of points does not matter: no other peer is answered while a ring is made."""
    hashed = []
    digest = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data, seed=0: hashed.append(data) or digest(data, seed))
    ring = HashRing((f"i{number}" for number in range(1000)), NODES, 1)
    assert len(hashed) == 1000
    assert len(ring._at) == 1000 * NODES


def test_one_more_instance_hashes_only_its_own_points(monkeypatch):
    """Instances that were there are not hashed again: several hundred instances register at once."""
    ring = HashRing((f"i{number}" for number in range(100)), NODES, 1)
    hashed, ordered = [], []
    digest, argsort = xxhash.xxh3_64_intdigest, np.argsort
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data, seed=0: hashed.append(data) or digest(data, seed))
    monkeypatch.setattr(np, "argsort", lambda values, **how: ordered.append(len(values)) or argsort(values, **how))
    for number in range(20):
        ring.change([f"new{number}"], [f"i{number}"])
    assert len(hashed) == 20
    assert ordered == [NODES] * 20


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=40), st.integers(0, (1 << 64) - 1))
def test_the_lower_bound_is_bisects(numbers, wanted):
    numbers.sort()
    packed = b"".join(number.to_bytes(8, "little") for number in numbers)
    signed = int.from_bytes(wanted.to_bytes(8, "little"), "little", signed=True)
    assert lower_bound(packed, signed) == bisect_left(numbers, wanted)
