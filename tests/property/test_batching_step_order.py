"""Steps keep their budget, prompts advance in the order of service, and all complete, for any arrivals."""

from __future__ import annotations

import math
from itertools import islice
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import PromptWork, StepLimits, StepScheduler, plan_chunks
from pinyon.batching.service_order import SERVICE_ORDERS
from tests.long import usually

SECONDS = (0.0, 0.5, 4.0)
DEADLINES = (0.0, 1.0, 5.0, 60.0)


@settings(max_examples=usually(20, long=200), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    choice=st.sampled_from(("fifo", "shortest_in_time:age_s=1", "most_in_time:age_s=1", "most_in_time")),
    budget=st.integers(1, 100),
    chunk=st.integers(1, 100),
    block=st.integers(1, 40),
)
def test_steps_follow_the_order_and_everybody_gets_through(
    seed: int, choice: str, budget: int, chunk: int, block: int
) -> None:
    rng, most = Random(seed), max(budget, min(block, chunk))
    scheduler = StepScheduler(StepLimits(4, budget, chunk, block), SERVICE_ORDERS.make(choice))
    order = SERVICE_ORDERS.make(choice)
    """A second service order that gets the same calls."""
    at: dict[int, tuple[int, int]] = {}
    """The requests in order of arrival."""
    token_s: dict[int, float] = {}
    comes, now_s, left = 30, 0.0, 0
    while comes or at:
        now_s += rng.choice((0.0, 0.3, 2.0))
        if comes and (not at or rng.random() < 0.5):
            end = rng.randint(1, 200)
            start, seconds, late_s = rng.randrange(end), rng.choice(SECONDS), rng.choice(DEADLINES)
            deadline_s = now_s + late_s if late_s else 0.0
            scheduler.add_prefill(PromptWork(comes, start, end, now_s, seconds, deadline_s))
            order.add(comes, now_s, seconds, deadline_s or math.inf)
            at[comes], token_s[comes] = (start, end), seconds / (end - start)
            left += end - start
            comes -= 1
        elif at and rng.random() < 0.1:
            gone = rng.choice(list(at))
            scheduler.remove_prefill(gone)
            order.remove(gone)
            left -= at[gone][1] - at[gone][0]
            del at[gone]
        plan = scheduler.decide(now_s)
        if plan is None:
            assert not at
            continue
        turns = list(at) if choice == "fifo" or len(at) == 1 else list(order.turns(now_s))
        takes = plan_chunks([at[each] for each in turns], budget_tokens=most, chunk_tokens=chunk, block_tokens=block)
        assert takes, "there is progress"
        assert plan.prefills == [
            (each, at[each][0], at[each][0] + take) for each, take in zip(islice(turns, len(takes)), takes, strict=True)
        ]
        assert plan.tokens <= most
        failed = {plan.prefills[0][0]} if rng.random() < 0.05 else set()
        scheduler.fold(plan, failed_prefills=failed)
        for number, start, end in plan.prefills:
            left -= end - start
            at[number] = end, at[number][1]
            order.advance(number, token_s[number] * (end - start))
            if number in failed or end == at[number][1]:
                order.remove(number)
                left -= at[number][1] - end
                del at[number]
        assert scheduler.prefilling == len(at)
        assert left == sum(end - start for start, end in at.values())
