"""Which node, and which one not for a while."""

from __future__ import annotations

from collections import Counter

from pinyon.store.avoidance import Avoidance
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


def test_the_pause_grows_with_failures_and_ends_with_a_success() -> None:
    avoidance = Avoidance(first_s=1.0, max_s=3.0)
    assert not avoidance.avoids("a", 0.0)
    avoidance.failed("a", 0.0)
    avoidance.failed("a", 0.1)  # was on its way when the first one failed
    assert avoidance.avoids("a", 0.99)
    assert not avoidance.avoids("a", 1.0)
    avoidance.failed("a", 1.0)
    assert avoidance.avoids("a", 2.9)
    avoidance.failed("a", 3.0)
    assert avoidance.avoids("a", 5.9)
    assert not avoidance.avoids("a", 6.0)
    avoidance.succeeded("a")
    avoidance.failed("a", 10.0)
    assert not avoidance.avoids("a", 11.0)


def test_a_bounded_number_of_peers_is_remembered() -> None:
    avoidance = Avoidance(max_peers=3)
    for number in range(10):
        avoidance.failed(str(number), 0.0)
    assert len(avoidance) == 3
    assert avoidance.avoids("9", 0.1)
