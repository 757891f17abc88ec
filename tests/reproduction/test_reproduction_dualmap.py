"""DualMap's figures without a cluster: on small workloads, and by arithmetic; the measures of its systems."""

from __future__ import annotations

import pytest

from pinyon_lab.papers import Workload, dualmap
from pinyon_lab.papers.dualmap.runs import DECODING, PREFILL_ONLY, DualMapSystem, goodput, load_of, ran
from tests.reproduction.small import asked, made, small


def test_a_key_is_one_block_longer_than_what_is_hot() -> None:
    rows = made("dualmap")["dualmap-fig6"].rows
    published = [row for row in rows if row["workload"] == "conversation" and row["rule"] == "published code"]
    lengths = {row["blocks"]: row["share"] for row in published}
    assert {2, 7, 14} <= set(lengths)
    assert sum(lengths.values()) == pytest.approx(1.0, abs=0.05)
    assert all(0.25 < lengths[blocks] < 0.36 for blocks in (2, 7, 14)), lengths


def test_the_second_choice_is_worth_most() -> None:
    assert [claim.agrees for claim in made("dualmap")["dualmap-fig15"].claims] == [True, True]


def test_metadata_by_arithmetic() -> None:
    swapped, *others = made("dualmap")["dualmap-a4"].claims
    assert (swapped.printed, swapped.ours, swapped.agrees) == ("9,632", "9,362", False)
    assert all(claim.agrees for claim in others)


def test_a_goodput_is_where_attainment_falls_below_the_share() -> None:
    assert goodput([(4.0, 0.99), (6.0, 0.95), (8.0, 0.85), (10.0, 0.2)]) == pytest.approx(7.0)
    assert goodput([(4.0, 0.99), (6.0, 0.95)]) == 6.0, "as far as was run"
    assert goodput([(4.0, 0.5)]) == 0.0


def test_a_run_is_the_same_again_and_another_with_another_seed() -> None:
    with small("dualmap"):
        load = load_of(asked("conversation"), "7B")
        first = ran(load, DualMapSystem(DECODING, "dualmap"), 8.0, lambda _: None)
        dualmap.runs._ran.cache_clear()
        assert ran(load, DualMapSystem(DECODING, "dualmap"), 8.0, lambda _: None) == first
        assert ran(load, DualMapSystem(DECODING, "dualmap", seed=1), 8.0, lambda _: None) != first
        assert first.samples
        assert all(len(loads) == 8 for _, loads in first.samples)
        assert not ran(load, DualMapSystem(PREFILL_ONLY, "dualmap"), 8.0, lambda _: None).samples


def test_prompts_are_cut_as_the_model_has_it() -> None:
    rows = [row._replace(input_tokens=40 * 512, blocks=tuple(range(40))) for row in asked("conversation").rows]
    long = Workload("conversation", rows, 512)
    assert {each.tokens for each in load_of(long, "14B", 10).arrivals} == {10_240}
    assert {len(each.blocks) for each in load_of(long, "14B", 10).arrivals} == {20}
    assert len(load_of(long, "7B", 10).arrivals) == 10
