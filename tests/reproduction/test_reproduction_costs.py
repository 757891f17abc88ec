"""Tests of the measured scheduling costs, with a number of calls and a clock that the tests give."""

from __future__ import annotations

import pytest

from pinyon.profiles.engine_profile import load_profile
from pinyon_lab.figures.round_costs import CHOICES, RoundLoad, engine_s, round_costs
from pinyon_lab.figures.tree_costs import ASKED, OPERATIONS, TreeLoad, tree_costs
from tests.reproduction.small import ticking

PROFILE = "rtx6000ada-llama-8b"


@pytest.mark.parametrize("hashed", [False, True])
def test_each_request_enters_and_leaves_once(hashed):
    """Each request looks for the best leaf twice, on entry and afterwards; at all other times the leaf is known."""
    costs = tree_costs(TreeLoad(20, 30, 10, 5, groups=2, batch=4, hashed=hashed), seed=1, rounds=2, clock=ticking())
    assert tuple(costs) == OPERATIONS
    calls = {operation: cost.calls for operation, cost in costs.items()}
    assert (calls["insert"], calls["add"], calls["finish"]) == (20, 20, 20)
    assert calls["find"] == 20 * ASKED == calls["find_first"] + calls["find_known"]
    # After the insertions and each of the 20 additions, and after each of the 16 ends before which a request waited.
    assert calls["find_first"] == 1 + 20 + 16
    assert {cost.p99_us for cost in costs.values()} == {0.0}, "reading the clock is all it took, and does not count"


LOAD = RoundLoad(320, requests=20, groups=2)


def test_a_round_of_the_engine_by_hand():
    """The round costs one step of each group of ten, and a tenth of a request enters.

    A step reads 10 · 484 tokens of KV (half of 200 are decoded), of which the 320 shared ones cost nine requests 0.6
    less. The request that enters has 64 tokens of its own."""
    profile = load_profile(PROFILE)
    step_s = 0.0167 + 10 * 5e-5 + 1.365e-7 * (4840 - 0.6 * 320 * 9)
    own_s = 64 * 1.34e-4 + 2.2e-9 * (384**2 - 320**2)
    assert engine_s(LOAD, profile) == pytest.approx(2 * step_s + 0.1 * own_s)


@pytest.mark.parametrize("choice", CHOICES.values())
@pytest.mark.parametrize("key_tokens", [1, 16])
def test_rounds_are_measured_whatever_the_policy(choice, key_tokens):
    load = RoundLoad(320, requests=20, groups=2, key_tokens=key_tokens)
    costs = round_costs(choice, load, load_profile(PROFILE), seed=1, rounds_max=12, clock=ticking())
    assert len(costs.cpu_ms) == 12
    assert 0.003 <= costs.median_s * 1e3 <= 0.1, "as many µs as it was looked at in a round"
    assert costs.of_engine_time == costs.median_s / engine_s(load, load_profile(PROFILE))
    assert costs.steps >= 1
