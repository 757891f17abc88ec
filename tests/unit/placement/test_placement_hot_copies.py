"""Orders of copies: from the node that is read much more to the one that is read least."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from pinyon.placement.hot_copies import FORGET_S, HotCopies
from pinyon.store.hot_reads import to_copy

NODES = ["s0", "s1", "s2", "s3"]
KEYS = [number.to_bytes(16, "big") for number in range(1000)]


def test_half_of_the_difference_goes_to_the_least_read_node() -> None:
    copies = HotCopies()
    for name, reads in ("s1", 20), ("s2", 0):
        assert copies.plan(name, 5.0, reads, 0, ["s0"], 0.0) is None
    assert copies.plan("s0", 5.0, 100, 100, ["s1", "s2"], 0.0) == ("s2", 50)
    assert copies.plan("s0", 5.0, 100, 30, ["s1"], 0.0) == ("s1", 15), "no more than half of what is hot"


def test_even_loads_need_no_copies() -> None:
    copies = HotCopies()
    copies.plan("s1", 5.0, 60, 0, ["s0"], 0.0)
    assert copies.plan("s0", 5.0, 100, 100, ["s1"], 0.0) is None
    copies.plan("s1", 5.0, 0, 0, ["s0"], 1.0)
    assert copies.plan("s0", 5.0, 100, 0, ["s1"], 1.0) is None, "nothing is hot"
    assert copies.plan("s0", 5.0, 100, 100, [], 1.0) is None
    assert copies.plan("s0", 5.0, 100, 100, ["s1"], 1.0 + FORGET_S) is None, "s1 says nothing any more"


def test_two_busy_nodes_do_not_choose_the_same_target() -> None:
    copies = HotCopies()
    for name in NODES:
        assert copies.plan(name, 5.0, 0, 0, NODES, 0.0) is None
    orders = [copies.plan(name, 5.0, 100, 100, [each for each in NODES if each != name], 1.0) for name in ("s0", "s1")]
    assert [order and order.target for order in orders] == ["s1", "s2"]


@pytest.mark.parametrize("skew", [0.8, 1.2, 2.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loads_become_even_and_stay_so(seed: int, skew: float) -> None:
    """A model of the pool: each key begins at one node, and each read goes to a random one of its holders."""
    print(f"{seed=} {skew=}")
    rng = random.Random(seed)
    holders: dict[bytes, list[str]] = {key: [rng.choice(NODES)] for key in KEYS}
    weights = [1 / (rank + 1) ** skew for rank in range(len(KEYS))]
    copies, made, loads = HotCopies(), 0, Counter[str]()
    for window in range(30):
        reads: dict[str, Counter[bytes]] = defaultdict(Counter)
        for key in rng.choices(KEYS, weights, k=5000):
            reads[rng.choice(holders[key])][key] += 1
        loads = Counter({name: reads[name].total() for name in NODES})
        made = 0
        for name in NODES:
            hot = [each for each in reads[name].most_common() if each[1] >= 8]
            others = [each for each in NODES if each != name]
            order = copies.plan(name, 5.0, loads[name], sum(count for _, count in hot), others, 5.0 * window)
            if order is not None:
                for key in to_copy(hot, [holders[each] for each, _ in hot], order.target, order.reads):
                    holders[key].append(order.target)
                    made += 1
    assert made == 0, "copies are still made"
    assert max(loads.values()) <= 2.2 * min(loads.values())
    assert sum(map(len, holders.values())) < 1.5 * len(KEYS)
