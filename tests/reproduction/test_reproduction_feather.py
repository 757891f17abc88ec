"""FEATHER's workloads, its takeaways, and what scheduling costs."""

from __future__ import annotations

import pytest

from pinyon_lab.papers import FIGURES, feather
from pinyon_lab.papers.feather.runs import FeatherLoad, FeatherServer, PromptParts, batches, one_batch, served, tree
from pinyon_lab.simulator.cluster_settings import GROUPED, SchedulingCost
from tests.reproduction.small import made, small, ticking

FEATHER = [name for name in FIGURES if name.startswith("feather-")]


# -- workloads


def test_prompts_share_the_blocks_of_what_they_begin_with() -> None:
    made = PromptParts()
    first = made.blocks([("a", 40), ("x", 20)])
    second = made.blocks([("a", 40), ("y", 20)])
    third = made.blocks([("b", 40), ("x", 20)])
    assert [len(each) for each in (first, second, third)] == [4, 4, 4], "of 60 tokens, the last one not full"
    assert first[:2] == second[:2], "40 tokens are two blocks; the third has tokens of both parts"
    assert len({*first, *second, *third}) == 2 + 2 + 2 + 4
    assert made.blocks([("a", 40), ("x", 20)]) == first


def test_a_tree_has_twice_the_branches_on_each_level() -> None:
    paths = [tree(leaf, 3, 400) for leaf in range(4)]
    assert [size for _, size in paths[0]] == [100, 100, 200]
    assert [len({path[level] for path in paths}) for level in range(3)] == [1, 2, 4]
    assert tree(0, 1, 400) == [("0: 0", 400)]


def test_a_rate_that_changes_does_so_when_it_says() -> None:
    times = [each.time_s for each in FeatherLoad(rates=((1.0, 50.0), (10.0, 50.0)), groups=1).arrivals()]
    assert times == sorted(times)
    assert 30 < sum(time < 50 for time in times) < 75
    assert 400 < sum(50 <= time < 100 for time in times) < 600


# -- takeaways


def shared_by(groups: int, requests: int = 60, tokens: int = 10_000) -> list[list[tuple[str, int]]]:
    return [[(f"{place % groups}", tokens), (f"own {place}", 20)] for place in range(requests)]


def test_one_stranger_takes_the_gain_from_all() -> None:
    same = shared_by(1)
    stranger = [*same[:-1], [("other", 10_000), ("own", 20)]]
    halves = shared_by(2)
    rates = [one_batch(each, 20, FeatherServer()).decode_tokens_s for each in (same, stranger, halves)]
    assert rates[0] > 1.4 * rates[1], "takeaway 1"
    assert rates[1] == pytest.approx(rates[2], rel=0.03), "takeaway 3: how many strangers is all the same"


def test_more_of_a_shared_prefix_is_faster() -> None:
    rates = [
        one_batch(
            [[("all", 500 * part), (f"own {n}", 2_000 - 500 * part + 16)] for n in range(40)], 20, FeatherServer()
        )
        for part in range(1, 5)
    ]
    assert [each.decode_tokens_s for each in rates] == sorted(each.decode_tokens_s for each in rates), "takeaway 2"


def test_what_memory_does_not_hold_is_computed_again() -> None:
    few, many = (one_batch(shared_by(groups), 20, FeatherServer()) for groups in (5, 30))
    assert not few.evicted
    assert many.evicted
    assert many.tokens_s < few.tokens_s / 2, "takeaway 3"


def test_the_first_level_counts_and_the_others_do_not() -> None:
    rates = {}
    for length in (1_000, 2_000):
        for levels in (1, 2, 3):
            prompts = [[*tree(n % (1 << levels - 1), levels, 4 * length), (f"own {n}", 20)] for n in range(40)]
            rates[length, levels] = one_batch(prompts, 20, FeatherServer()).decode_tokens_s
    for length in (1_000, 2_000):
        assert rates[length, 1] > 1.2 * rates[length, 2], "takeaway 4"
        assert rates[length, 2] == pytest.approx(rates[length, 3], rel=0.01)


def test_the_gain_is_with_long_prefixes_only() -> None:
    def gain(tokens: int) -> float:
        one, two = (
            one_batch(shared_by(groups, 200, tokens), 10, FeatherServer(machine="rtx6000ada-qwen-0.5b"))
            for groups in (1, 2)
        )
        return one.decode_tokens_s / two.decode_tokens_s - 1

    assert gain(128) < 0.05, "experiment 5"
    assert gain(10_000) > 0.25


def test_batches_of_one_prefix_are_faster_unless_small_or_short() -> None:
    def rate(groups: int, split: int, output_tokens: int) -> float:
        prompts = sorted(shared_by(groups, 160))
        size = len(prompts) // split
        parts = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        return batches(parts, output_tokens, FeatherServer()).tokens_s

    assert rate(4, 4, 100) > 1.1 * rate(4, 1, 100), "takeaway 8"
    assert rate(4, 32, 100) < rate(4, 4, 100), "takeaway 8"
    assert rate(4, 4, 1) == pytest.approx(rate(4, 1, 1), rel=0.05), "prompts are all of it"


def test_larger_batches_gain_less_and_later_with_a_shared_prefix() -> None:
    def full_at(groups: int) -> int:
        rates = {
            n: one_batch(shared_by(groups, n), 10, FeatherServer()).decode_tokens_s for n in (5, 10, 20, 40, 80, 160)
        }
        return next(n for n in rates if rates[n] > 0.8 * rates[160])

    assert full_at(5) < full_at(1), "takeaway 7"


def test_a_run_is_the_same_again() -> None:
    load = FeatherLoad(requests=40, output_tokens=20)
    first = served(load, FeatherServer("bandit"), lambda _: None)
    feather.runs._served.cache_clear()
    assert served(load, FeatherServer("bandit"), lambda _: None) == first
    assert first.tokens_s > 0
    assert first.batch <= 40


# -- what scheduling costs


def test_measuring_figures_need_a_clock_and_repeat_with_it() -> None:
    measuring = [name for name in FEATHER if FIGURES[name].measures]
    assert len(measuring) == 6
    for name in measuring:
        with pytest.raises(ValueError, match=f"{name} measures CPU time and needs a clock"):
            FIGURES[name].make((), lambda _: None)
    with small("feather"):
        again = FIGURES["feather-fig5.9"].make((), lambda _: None, ticking())
    assert again.rows == made("feather")["feather-fig5.9"].rows


def test_a_server_waits_for_its_scheduler_as_long_as_measured() -> None:
    """Every policy costs time before each step; one that orders the queue also costs time for each waiting request."""
    with small("feather"):
        costs = feather.costs.waits(("fcfs", "bandit", "lpm", feather.costs.RADIX), 320, lambda _: None, ticking())
    assert all(each.step_s > 0 for each in costs.values())
    assert [name for name, each in costs.items() if each.waiting_s] == ["lpm", feather.costs.RADIX]
    assert costs[feather.costs.RADIX].step_s == costs["bandit"].step_s


def test_a_schedulers_time_lowers_throughput_and_delays_tokens() -> None:
    load = FeatherLoad(requests=60, output_tokens=20, prefix_tokens=640)
    free, slow = (
        served(load, FeatherServer(max_batch=20, scheduling=cost), lambda _: None)
        for cost in (SchedulingCost(), SchedulingCost(0.0, 2e-3))
    )
    assert free.stalled == 0
    assert slow.stalled > 0.1, "forty wait while twenty run"
    assert slow.tokens_s < 0.9 * free.tokens_s
    assert slow.tbt_s > 1.1 * free.tbt_s
    assert slow.reading < free.reading
    assert slow.computing < free.computing


def test_a_kernel_that_reads_groups_once_speeds_up_mixed_batches() -> None:
    load = FeatherLoad(requests=60, output_tokens=50)
    plain, grouped = (served(load, FeatherServer(kernel=kernel), lambda _: None) for kernel in ("whole", GROUPED))
    assert grouped.tokens_s > 1.1 * plain.tokens_s
    assert grouped.read_s < plain.read_s
