"""The demo's claims about the KV store: each is checked, and named when it does not hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.demo_client import DemoAnswer
from launch.demo_store import StoreStep, workers_of


def reused(**report: Any) -> DemoAnswer:
    told = {"prefill_instance": "prefill-1", "decode_instance": "decode-1", "store_tokens": 64, **report}
    return DemoAnswer("turn 2", text="jays", cached_tokens=64, report=told)


COMPUTED = DemoAnswer("turn 2", text="jays")
KNEW = {"prefill-0", "decode-0"}
MEMORY = StoreStep("memory", KNEW, reused(), COMPUTED, hit_tokens=64, disk_tokens=0)
DISK = StoreStep("disk", KNEW, reused(), COMPUTED, hit_tokens=64, disk_tokens=64)


@pytest.mark.parametrize("step", [MEMORY, DISK])
def test_nothing_is_said_where_every_claim_holds(step: StoreStep) -> None:
    assert step.broken_claims() == []
    assert workers_of(step.reused) == {"prefill-1", "decode-1"}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (replace(MEMORY, computed=replace(COMPUTED, text="jay")), "the store changed the answer"),
        (replace(MEMORY, knew={"prefill-1"}), "it ran on a worker that knew the conversation"),
        (replace(MEMORY, knew={"decode-1"}), "it ran on a worker that knew the conversation"),
        (replace(MEMORY, reused=reused(store_tokens=32)), "32 tokens came from workers' own pools"),
        (replace(MEMORY, reused=replace(reused(store_tokens=0), cached_tokens=0)), "nothing came from the store"),
        (replace(MEMORY, hit_tokens=32), "the node's counters know of 32 tokens only"),
        (replace(DISK, disk_tokens=32), "only 32 tokens came from the disk"),
        (replace(MEMORY, computed=replace(COMPUTED, cached_tokens=64)), "without reuse, 64 tokens were reused"),
    ],
)
def test_the_claim_that_does_not_hold_is_named(step: StoreStep, said: str) -> None:
    assert step.broken_claims() == [f"turn 2: {said}"]
