"""A worker's pool and a replay of its recorded trace keep the same blocks."""

from __future__ import annotations

import pytest

from bench.live import Setting, measure
from bench.live_load import Mix
from tests.forks import forked

# Long prompts, so that blocks missing in a trace, or kept by no worker, weigh little.
MIX = Mix(seconds=5.0, chats_per_s=6.0, calls_per_s=30.0, think_s=0.5, turn=100, answer=6, call=400)


@pytest.mark.parametrize(("choice", "off_books"), [("lru", 0.1), ("reuse_hazard:refit_s=0.5", 2.0)])
def test_live_and_simulated_hit_ratios_are_near(choice: str, off_books: float) -> None:
    """Requests run one at a time, at times that the trace has, too. Learning, in a thread, lags behind a replay."""
    ran = measure(choice, Setting(MIX, seed=1, pool_blocks=384, at_once=1, engine="instant"), forked)
    print(ran)
    assert abs(ran.difference) <= 2.0
    assert abs(ran.live_percent - ran.as_worker_percent) <= off_books
    assert ran.belady_percent > ran.simulated_percent, "the pool was large enough for everything"
