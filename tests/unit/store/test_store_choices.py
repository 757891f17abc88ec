"""The choice of a node, and the avoidance of a node for a while."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from pinyon.store.copies import plan_copies
from pinyon.store.records import NodeRecord, NodeRoom
from pinyon.store.runs import Run, choose_nodes, leading_runs, rank

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
    runs = partial(leading_runs, cost=lambda node: node.node_id)
    held = [{a, b}, {a, b}, {b}, {b, c}, {c}, set(), {a}]
    assert runs(held, 9) == [(b, 4), (c, 1)]
    assert runs(held, 1) == [(b, 4)]
    assert runs([{b, a}, {a, b}], 9) == [(a, 2)]
    assert runs([set(), {a}], 9) == runs([], 9) == []


def test_copies_of_a_prompts_beginning_are_read() -> None:
    a, b = (NodeRecord(name, "0" * 32, f"{name}:1") for name in "ab")
    held = [{a, b}] * 20 + [{b}] * 12
    assert leading_runs(held, 9, lambda node: node.node_id) == [(a, 20), (b, 12)]
    assert leading_runs(held, 9, lambda node: "ba".index(node.node_id)) == [(b, 32)]
    assert leading_runs(held[5:], 9, lambda node: node.node_id) == [(a, 15), (b, 12)]
    assert leading_runs(held[12:], 9, lambda node: node.node_id) == [(b, 20)], "less than half as far"
    assert leading_runs([{a, b}] * 7 + [{b}], 9, lambda node: node.node_id) == [(b, 8)], "too few for a run"


@pytest.mark.parametrize("seed", range(20))
def test_runs_end_where_the_first_block_is_missing(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [NodeRecord(name, "0" * 32, f"{name}:1") for name in "abcd"]
    held = [set(rng.choices(nodes, k=3)) for _ in range(200)] + [set()] * 5
    for node in nodes[:2]:
        for at in range(rng.randrange(100)):
            held[at].add(node)
    runs = leading_runs(held, 500, lambda node: rng.random())
    at = 0
    for node, count in runs:
        assert count > 0
        assert all(node in each for each in held[at : at + count])
        at += count
    assert at == 200


def node(name: str, free: int | None = None, worth: float | None = None, zone: str = "") -> NodeRecord:
    return NodeRecord(name, "0" * 32, f"{name}:1", 1, zone, NodeRoom(free, worth))


def chosen(*nodes: NodeRecord, run: Run | None = None) -> list[str]:
    """Returns the preferences for two objects of 10 bytes whose best node by rank is kv-0, then kv-2."""
    run = run or Run()
    return choose_nodes([(KEYS[7], run), (KEYS[8], run)], {each.node_id: each for each in nodes}, 2, 10)[run]


def test_the_best_node_is_chosen_while_it_has_room() -> None:
    assert chosen(node("kv-0", 20, -9.0), node("kv-2", 1000, -99.0)) == ["kv-0", "kv-2"]
    assert chosen(node("kv-0"), node("kv-2", 1000)) == ["kv-0", "kv-2"], "its room is not known"


def test_of_two_full_nodes_the_one_with_the_colder_head_evicts() -> None:
    assert chosen(node("kv-0", 19, -9.0), node("kv-2", 20, -1.0)) == ["kv-2", "kv-0"], "it has room"
    assert chosen(node("kv-0", 19, -9.0), node("kv-2", 19, -9.5)) == ["kv-2", "kv-0"]
    assert chosen(node("kv-0", 19, -9.0), node("kv-2", 19, -8.5)) == ["kv-0", "kv-2"]
    assert chosen(node("kv-0", 19, None), node("kv-2", 19, -9.5)) == ["kv-0", "kv-2"]
    third = node("kv-1", 1000, -99.0)
    assert chosen(node("kv-0", 19, -9.0), node("kv-2", 19, -8.5), third) == ["kv-0", "kv-2"], "two are compared"


def test_a_run_stays_where_it_began() -> None:
    run = Run()
    assert chosen(node("kv-0", 19, -9.0), node("kv-2", 19, -9.5), run=run) == ["kv-2", "kv-0"]
    assert chosen(node("kv-0", 1000, -9.0), node("kv-2", 0, -1.0), run=run) == ["kv-2", "kv-0"]
    assert chosen(node("kv-0", 1000), run=run) == ["kv-0"], "its node has gone"


def test_copies_go_to_the_next_nodes_and_the_last_ones_go_first() -> None:
    nodes = [node(name) for name in NODES]  # by rank kv-0, kv-2, kv-1, kv-3
    keys, holders = KEYS[7:9], [["kv-2"], ["kv-0", "gone"]]
    assert plan_copies(keys, holders, nodes, 2) == ({("kv-2", "kv-0"): [KEYS[7]], ("kv-0", "kv-2"): [KEYS[8]]}, {})
    plan = plan_copies(keys, [["kv-3", "kv-1", "kv-2"], ["kv-3"]], nodes, 1)
    assert plan == ({}, {"kv-1": [KEYS[7]], "kv-3": [KEYS[7]]}), "one copy stays, wherever it is"
    assert plan_copies(keys, [["gone"], []], nodes, 4) == ({}, {}), "there is nothing to copy from"
    assert plan_copies(keys, [[], []], [], 4) == ({}, {})


def test_copies_go_to_zones_that_have_none() -> None:
    nodes = [node("kv-0", zone="a"), node("kv-1", zone="b"), node("kv-2", zone="a"), node("kv-3", zone="b")]
    plan = plan_copies(KEYS[7:8], [["kv-2"]], nodes, 2)
    assert plan.make == {("kv-2", "kv-1"): KEYS[7:8]}
    plan = plan_copies(KEYS[7:8], [["kv-0", "kv-2", "kv-1"]], nodes, 2)
    assert plan.remove == {"kv-2": KEYS[7:8]}
    assert sorted(plan_copies(KEYS[7:8], [["kv-0"]], nodes, 9).make) == [("kv-0", f"kv-{n}") for n in (1, 2, 3)]
