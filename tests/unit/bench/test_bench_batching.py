"""What the benchmark of batches asks for, and how often."""

from __future__ import annotations

import pytest

from bench.batching_tree import ASKED, OPERATIONS, TreeLoad, tree_costs


@pytest.mark.parametrize("hashed", [False, True])
def test_each_request_enters_and_leaves_once(hashed):
    """And for each the best one is looked for twice: when it enters and after, all other times it is known."""
    costs = tree_costs(TreeLoad(20, 30, 10, 5, groups=2, batch=4, hashed=hashed), seed=1, rounds=2)
    assert tuple(costs) == OPERATIONS
    calls = {operation: cost["calls"] for operation, cost in costs.items()}
    assert (calls["insert"], calls["add"], calls["finish"]) == (20, 20, 20)
    assert calls["find"] == 20 * ASKED == calls["find_first"] + calls["find_known"]
    # After the insertions and each of the 20 additions, and after each end before which somebody waited: 16.
    assert calls["find_first"] == 1 + 20 + 16
    assert all(cost["p50_us"] <= cost["p99_us"] for cost in costs.values())
