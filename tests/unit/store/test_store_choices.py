"""The choice of a node, and the avoidance of a node for a while."""

from __future__ import annotations

from collections import Counter

from pinyon.store.records import NodeRecord
from pinyon.store.runs import leading_runs, rank

NODES = dict.fromkeys(["kv-0", "kv-1", "kv-2", "kv-3"], 1.0)
KEYS = [number.to_bytes(16, "big") for number in range(2000)]


def test_the_ranking_is_fixed_and_ignores_the_order_of_nodes() -> None:
    assert rank(KEYS[7], NODES) == rank(KEYS[7], dict(reversed(NODES.items()))) == ["kv-0", "kv-2", "kv-1", "kv-3"]
    assert rank(KEYS[7], {}) == []


def test_keys_are_spread_evenly() -> None:
    firsts = Counter(rank(key, NODES)[0] for key in KEYS)
    assert all(400 < firsts[node] < 600 for node in NODES)


def test_a_node_gets_its_share_of_the_weights() -> None:
    firsts = Counter(rank(key, {"kv-0": 3e12, "kv-1": 1e12, "kv-2": 1.0})[0] for key in KEYS)
    assert 1400 < firsts["kv-0"] < 1600
    assert firsts["kv-0"] + firsts["kv-1"] == len(KEYS)


def test_a_node_that_grows_only_wins_keys() -> None:
    grown = {**NODES, "kv-2": 2.0}
    moved = [key for key in KEYS if rank(key, grown)[0] != rank(key, NODES)[0]]
    assert 200 < len(moved) < 400  # from a quarter to two fifths
    assert {rank(key, grown)[0] for key in moved} == {"kv-2"}


def test_only_the_keys_of_a_lost_node_move() -> None:
    for key in KEYS[:200]:
        before = rank(key, NODES)
        assert rank(key, {node: 1.0 for node in NODES if node != "kv-2"}) == [node for node in before if node != "kv-2"]


def test_leading_blocks_are_read_in_as_few_runs_as_can_be() -> None:
    a, b, c = (NodeRecord(name, "0" * 32, f"{name}:1") for name in "abc")
    held = [{a, b}, {a, b}, {b}, {b, c}, {c}, set(), {a}]
    assert leading_runs(held, 9) == [(b, 4), (c, 1)]
    assert leading_runs(held, 1) == [(b, 4)]
    assert leading_runs([{b, a}, {a, b}], 9) == [(a, 2)]
    assert leading_runs([set(), {a}], 9) == leading_runs([], 9) == []
