"""Mooncake's figures: on small workloads against plain replays, on the public traces against known values."""

from __future__ import annotations

import pytest

from pinyon_lab.caches.replay import CacheReplay, replay, replayed
from pinyon_lab.figures.serving import node
from pinyon_lab.figures.workload import together
from pinyon_lab.papers import FIGURES, SOURCES, Basis, Result, Workload
from pinyon_lab.papers.mooncake.figures import CAPACITIES_M, prefill_flops
from pinyon_lab.papers.mooncake.transfer import least_bytes_s
from pinyon_lab.traces import TraceFile, TraceRow
from tests.reproduction.small import SHARED, made, plain, text_of
from tests.unit.eviction.test_eviction_replay import trace

BLOCK = 500_000
"""The block size in tokens, with which small workloads fill the figures' caches."""


def workload(name: str, seed: int, *, generated: bool = False) -> Workload:
    rows = [
        TraceRow(5.0 + number, BLOCK * len(blocks), 1, tuple(blocks)) for number, blocks in enumerate(trace(seed, 200))
    ]
    return Workload(name, rows, BLOCK, generated)


def make(name: str, *workloads: Workload) -> Result:
    return FIGURES[name].make(workloads, lambda _: None)


def test_joined_workloads_share_no_blocks_and_are_sorted_by_time() -> None:
    one = Workload("one", [TraceRow(7.0, 9, 1, (1, 2)), TraceRow(9.0, 9, 1, (1,))], 16)
    two = Workload("two", [TraceRow(1.0, 9, 1, (1, 2)), TraceRow(2.0, 9, 1, (2,))], 16, generated=True)
    both = together([one, two])
    assert (both.name, both.generated) == ("one + two", True)
    assert [(row.time_s, row.blocks) for row in both.rows] == [(0.0, (2, 4)), (0.0, (3, 5)), (1.0, (5,)), (2.0, (2,))]


def test_fig9_has_the_hits_of_a_replay_for_each_capacity() -> None:
    given = [workload("conversation", 1), workload("synthetic", 2)]
    result = make("mooncake-fig9", *given)
    assert [row["workload"] for row in result.rows] == ["conversation", "synthetic", "conversation + synthetic"]
    for row, each in zip(result.rows, [*given, together(given)], strict=True):
        for millions in CAPACITIES_M:
            cache = replay(each.asked(), "lru", 2 * millions)
            assert row[f"at_{millions}m"] == cache.hit_blocks / cache.blocks
        endless = replay(each.asked(), "lru", 1 << 30)
        assert row["ideal"] == endless.hit_blocks / endless.blocks


def test_fig10_has_the_hits_of_nodes_and_of_one_cache() -> None:
    given = [workload("conversation", 1), workload("toolagent", 3, generated=True)]
    result = make("mooncake-fig10", *given)
    for each in given:
        rows = {row["setup"]: row for row in result.rows if row["workload"] == each.name}
        asked = each.asked()
        blocks = sum(len(one.blocks) for one in asked)
        whole = replay(asked, "lru", 60)
        assert rows["global"]["hit_ratio"] == whole.hit_blocks / blocks
        in_turn = sum(replay(asked[node::10], "lru", 6).hit_blocks for node in range(10))
        assert rows["local, in turn"]["hit_ratio"] == in_turn / blocks
        assert rows["global"]["global_to_this"] == 1
        assert rows["local, in turn"]["global_to_this"] == pytest.approx(whole.hit_blocks / in_turn)
        assert {row["basis"] for row in rows.values()} == {Basis.CONSTRUCTION if each.generated else Basis.MEASURED}


def test_table2_has_the_hits_of_an_endless_cache() -> None:
    given = [workload("conversation", 1), workload("toolagent", 3, generated=True)]
    result = make("mooncake-table2", *given)
    for row, each in zip(result.rows, given, strict=True):
        endless, hits = replayed(each.asked(), "lru", lambda make: CacheReplay(make(), 1 << 30))
        ratio = endless.hit_blocks / endless.blocks
        assert (row["requests"], row["input"]) == (200, BLOCK * endless.blocks / 200)
        assert row["of all blocks"] == row["of all tokens"] == pytest.approx(ratio)
        shares = [count / max(1, len(one.blocks)) for one, count in zip(each.rows, hits, strict=True)]
        assert row["mean over the requests"] == pytest.approx(sum(shares) / 200)
    assert not any(claim.agrees for claim in result.claims)
    assert result.claims[0].ours == "conversation 200", "a generated one proves nothing"


def test_of_a_last_block_only_what_is_full_counts_as_tokens() -> None:
    rows = [TraceRow(0.0, 520, 7, (1, 2)), TraceRow(1.0, 520, 9, (1, 2))]
    (row,) = make("mooncake-table2", Workload("conversation", rows, 512)).rows
    assert (row["of all tokens"], row["of all blocks"], row["output"]) == (0.5, 0.5, 8.0)


def test_blocks_of_different_sizes_are_not_put_together() -> None:
    other = Workload("synthetic", workload("synthetic", 2).rows, 16)
    result = make("mooncake-fig9", workload("conversation", 1), other)
    assert [row["workload"] for row in result.rows] == ["conversation", "synthetic"]
    assert any("of 16 or 500000 tokens" in note for note in result.notes)


def test_prefill_is_equation_1() -> None:
    assert prefill_flops(8192, 0) == 80 * (4 + 22) * 8192**3
    assert prefill_flops(8192, 8192) == 0
    # Eq. 2 with Table 1: the bytes per second that load the KV of 8192 tokens as fast as it is computed.
    loaded = 8192 * 80 * (2 * 8192 / 8) * 2
    assert round(loaded / (prefill_flops(8192, 0) / (8 * 312e12)) / 1e9) == 6, "GB/s, §2.2"


def test_a_machine_computes_at_half_of_its_peak() -> None:
    _, engine = node()
    flops = 80 * (4 * 8192**2 * 8192 + 22 * 8192 * 8192**2)
    assert engine.seconds([(0, 8192)], 0, 0) == pytest.approx(2 * flops / (8 * 312e12), rel=0.001)


def test_equation_2_is_where_fetching_and_computing_take_as_long() -> None:
    for prefix in (512, 8192, 100_000):
        bytes_s = least_bytes_s(8 * 312e12, prefix)
        compute_s = 80 * (4 * prefix**2 * 8192 + 22 * prefix * 8192**2) / (8 * 312e12)
        fetch_s = prefix * 80 * (2 * 8192 / 8) * 2 / bytes_s
        assert fetch_s == pytest.approx(compute_s)


def test_printed_values_of_eq2_and_fig14() -> None:
    assert [claim.agrees for claim in made("mooncake")["mooncake-eq2"].claims] == [True, True]
    prefill, _ = made("mooncake")["mooncake-fig14"].claims
    assert prefill.agrees


def test_replicas_are_counted_on_prefill_instances() -> None:
    rows = [row for row in made("mooncake")["mooncake-fig11"].rows if row["workload"] == "conversation"]
    assert rows
    assert all(0 <= row["least"] <= row["mean"] <= row["most"] <= 8 for row in rows)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_can_be_addressed(name: str) -> None:
    figure = FIGURES[name]
    assert figure.name == name
    assert figure.section.startswith("§")
    assert {*figure.needs, *figure.likes} <= set(SOURCES)
    assert not set(figure.needs) & set(figure.likes)


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
@pytest.mark.parametrize("name", ["mooncake-table2", "mooncake-fig9", "mooncake-fig10"])
def test_quotes_are_in_the_paper(name: str) -> None:
    for claim in make(name, workload("conversation", 1), workload("synthetic", 2)).claims:
        for part in claim.said.split(" ... "):
            assert plain(part) in text_of("mooncake")


def public(name: str) -> Workload:
    source = SHARED / "traces" / f"{SOURCES[name].stem}.jsonl.gz"
    return Workload(name, TraceFile(source).sorted_rows(), 512)


@pytest.mark.skipif(not (SHARED / "traces").is_dir(), reason="the public traces are not here")
def test_the_public_traces() -> None:
    given = [public("conversation"), public("synthetic")]
    conversation, synthetic, _ = make("mooncake-fig9", *given).rows
    # These values come from an LRU replay that shares no code with this one.
    assert conversation["at_30m"] / conversation["ideal"] == pytest.approx(0.979, abs=5e-4)
    assert synthetic["at_30m"] == synthetic["ideal"], "all of it fits"
    requests, lengths, answers, ratio = make("mooncake-table2", *given).claims
    assert requests.agrees
    assert lengths.agrees
    assert answers.agrees
    assert (ratio.ours, ratio.agrees) == ("conversation 37.4%, synthetic 65.1%", False)
    found = {(row["workload"], row["setup"]): row["hit_ratio"] for row in make("mooncake-fig10", *given).rows}
    assert found["conversation", "global"] == pytest.approx(103511 / 288500)
    assert found["conversation", "local, in turn"] == pytest.approx(30047 / 288500)
    assert found["conversation", "local, cache affinity"] == pytest.approx(39258 / 288500), "one node, all alone"
    assert found["synthetic", "local, cache affinity"] == found["synthetic", "global"], "nothing to gain"
