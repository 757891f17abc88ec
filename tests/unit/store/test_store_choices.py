"""Which node, and which one not for a while."""

from __future__ import annotations

from collections import Counter

from pinyon.store.rendezvous import rank

NODES = ["kv-0", "kv-1", "kv-2", "kv-3"]
KEYS = [number.to_bytes(16, "big") for number in range(2000)]


def test_the_ranking_does_not_depend_on_the_order_of_nodes_and_is_fixed() -> None:
    assert rank(KEYS[7], NODES) == rank(KEYS[7], reversed(NODES)) == ["kv-0", "kv-2", "kv-1", "kv-3"]
    assert rank(KEYS[7], []) == []


def test_keys_are_spread_evenly() -> None:
    firsts = Counter(rank(key, NODES)[0] for key in KEYS)
    assert all(400 < firsts[node] < 600 for node in NODES)


def test_only_the_keys_of_a_lost_node_move() -> None:
    for key in KEYS[:200]:
        before = rank(key, NODES)
        assert rank(key, [node for node in NODES if node != "kv-2"]) == [node for node in before if node != "kv-2"]
