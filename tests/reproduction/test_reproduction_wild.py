"""Figs. 25 to 28 of "KVCache cache in the wild": rows against plain replays, claims against made-up rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from pinyon.eviction.interface import Traits
from pinyon.eviction.lru import Lru
from pinyon_lab.caches.replay import replay
from pinyon_lab.figures.figure import FigureInputs, RowList, Table
from pinyon_lab.papers import FIGURES, Basis, Claim, Result, Workload
from pinyon_lab.papers.wild.figures import (
    BASELINES,
    HOUR_S,
    LIFE_S,
    LIVES_S,
    HeadFirst,
    add_ablation_claims,
    add_claims,
    capacity_blocks,
    computed_per_s,
    served,
)
from pinyon_lab.policies.eviction import Lfu
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.analysis.models import MODELS
from tests.reproduction.small import SHARED, plain, text_of
from tests.reproduction.test_reproduction_mooncake import make
from tests.unit.eviction.test_eviction_replay import trace

QWEN, LLAMA2, LLAMA3 = MODELS
BLOCK = 100_000
"""The block size in tokens, with which a few blocks fill an instance."""
POLICIES = ("lru", "fifo", "lfu", "s3fifo", "gdfs", "sieve", "workload_aware", "reuse_hazard", "belady")


def workload(name: str, seed: int, *, generated: bool = False) -> Workload:
    kinds = random.Random(seed)
    rows = [
        TraceRow(5.0 + number, BLOCK * len(blocks), 1, tuple(blocks), kinds.choice(("text", "file")), 1)
        for number, blocks in enumerate(trace(seed, 70))
    ]
    return Workload(name, rows, BLOCK, generated)


def test_capacity_and_load_of_an_instance() -> None:
    # 80 GiB less a tenth and 2 bytes per parameter, in blocks of 0.875 MB
    assert capacity_blocks(QWEN, 16, 0) == (77_309_411_328 - 15_231_233_024) // (896 * 1024) == 67_659
    assert capacity_blocks(QWEN, 16, 1) == 135_319
    assert capacity_blocks(QWEN, 512, 0.5) == int(1.5 * 62_078_178_304) // (32 * 896 * 1024)
    assert capacity_blocks(LLAMA3, 16, 0) == (4 * 77_309_411_328 - 141_107_412_992) // (16 * 320 * 1024)
    assert computed_per_s(QWEN) == pytest.approx(5 * (0.53 * 973 + 0.47 * 5953) * 0.38)
    assert computed_per_s(LLAMA2) / computed_per_s(QWEN) == pytest.approx(7.6156 / 13.0159, rel=1e-4)
    assert computed_per_s(LLAMA3) / computed_per_s(QWEN) == pytest.approx(4 * 7.6156 / 70.5537, rel=1e-4)


def rows_by(count: int, named: str = "user", tokens: int = 16_000) -> list[TraceRow]:
    """Returns requests of nine users (or sessions) in turn, one a second; nine neighbours share their first block."""
    return [
        TraceRow(3.0 + at, tokens, 0, (2 * (at - at % 9), 2 * at + 1))._replace(**{named: f"u{at % 9}"})  # type: ignore[arg-type]
        for at in range(count)
    ]


@pytest.mark.parametrize("named", ["user", "chat"])
def test_whole_users_or_sessions_are_served(named: str) -> None:
    rows = rows_by(9 * 450, named)
    part = served(Workload("w", rows, 8_000), QWEN, random.Random(1))
    hour = [row for row in rows if row.time_s < 3.0 + HOUR_S]
    assert len(hour) == 3600
    of = Counter(getattr(row, named) for row in part.rows)
    assert set(of.values()) == {400}, "all of the hour, or nothing"
    # nine rows have ten blocks of 8,000 tokens to compute
    assert len(of) == round(9 * computed_per_s(QWEN) / (10 * 8_000 / 9)) == 6
    assert [row for row in hour if getattr(row, named) in of] == part.rows, "at their own times"
    assert served(Workload("w", rows, 8_000), QWEN, random.Random(1)) == part


def test_what_names_nobody_or_fits_is_served_whole() -> None:
    nameless = Workload("w", rows_by(300, "parent"), 8_000)
    assert served(nameless, LLAMA2, random.Random(1)) == nameless
    light = Workload("w", rows_by(300, tokens=1_000), 8_000)
    assert served(light, LLAMA2, random.Random(1)) == light


@pytest.mark.parametrize(("name", "model"), [("wild-fig25", QWEN), ("wild-fig26", LLAMA2), ("wild-fig27", LLAMA3)])
def test_rows_have_the_hits_of_replays(name: str, model: Any) -> None:
    given = [workload("qwen-a", 1, generated=True), workload("qwen-b", 2)]
    result = make(name, *given)
    ratios = [row["ratio"] for row in result.rows if row["workload"] == "qwen-a"]
    assert ratios[0] == 0
    assert 1 in ratios
    assert [row["workload"] for row in result.rows] == [each.name for each in given for _ in ratios]
    for row in result.rows:
        (each,) = (each for each in given if each.name == row["workload"])
        assert row["basis"] == (Basis.CONSTRUCTION if each.generated else Basis.MEASURED)
        capacity = max(1, int(model.kv_hbm_bytes * (1 + row["ratio"]) / model.token_bytes / BLOCK))
        assert row["capacity_blocks"] == capacity
        for policy in POLICIES:
            cache = replay(each.asked(), policy, capacity)
            assert row[policy] == cache.hit_blocks / cache.blocks
        endless = replay(each.asked(), "lru", 1 << 30)
        assert row["ideal"] == endless.hit_blocks / endless.blocks
        others: list[Any] = [row["lru"], row["fifo"], row["lfu"], row["s3fifo"]]
        assert row["over_best"] == row["workload_aware"] - max(others)
        assert row["over_worst"] == row["workload_aware"] - min(others)


def made_up(**changes: float) -> list[dict[str, Any]]:
    """Returns rows as the paper would have them; ``changes`` are named like ``a_2_lru``: workload, ratio, policy."""
    rows = []
    for name in ("a", "b"):
        for ratio, best in ((0.0, 0.30), (1.0, 0.40), (2.0, 0.45)):
            row: dict[str, Any] = {"workload": f"qwen-{name}", "ratio": ratio, "basis": Basis.CONSTRUCTION}
            row |= {"lru": best, "fifo": best - 0.01, "s3fifo": best - 0.005, "lfu": best - 0.08, "belady": best + 0.1}
            row["workload_aware"] = best + (0.035 - 0.01 * ratio)
            if name == "b":
                row |= {"workload_aware": best, "belady": best + 0.004}
            prefix = f"{name}_{ratio:g}_"
            row |= {key.removeprefix(prefix): value for key, value in changes.items() if key.startswith(prefix)}
            others = [row[policy] for policy in BASELINES]
            row["over_best"] = row["workload_aware"] - max(others)
            row["over_worst"] = row["workload_aware"] - min(others)
            rows.append(row)
    return rows


WORST, BEST, FALLS, MORE_ON_A, FALLS_BACK, OPTIMAL = range(6)


def claims_of(add: Callable[[Table], None], rows: list[dict[str, Any]]) -> list[Claim]:
    table = Table(FigureInputs((), lambda _: None, lambda: 0, "§4.3", quick=False))
    table.rows = RowList(rows)
    add(table)
    return table.claims


def test_claims_agree_with_rows_as_in_the_paper() -> None:
    found = claims_of(add_claims, made_up())
    assert [claim.agrees for claim in found] == [True] * 6
    assert [claim.printed for claim in found] == ["8.1–23.9 %", "1.5–3.9 %", None, None, None, None]
    assert {claim.basis for claim in found} == {Basis.CONSTRUCTION}
    assert found[WORST].ours == "9.5 to 10.5 points"
    assert found[BEST].ours == "1.5 to 2.5 points"
    assert "relative, which the text may mean, 3.3 to 6.3 %" in found[BEST].why
    assert found[MORE_ON_A].ours == "+2.0 on A, +0.0 points on B"
    assert found[OPTIMAL].ours == "95.4% of Belady's hits at least, LFU 72.4%"


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"a_2_lfu": 0.10}, {WORST}),
        ({"a_1_lfu": 0.38, "a_2_lfu": 0.44}, {WORST}),
        ({"a_1_lru": 0.42}, {BEST, FALLS}),
        ({"a_1_workload_aware": 0.45}, {BEST}),
        ({"a_2_workload_aware": 0.479}, {FALLS}),
        ({"b_1_workload_aware": 0.45, "b_2_workload_aware": 0.50}, {MORE_ON_A, FALLS_BACK}),
        ({"b_0_fifo": 0.2}, {OPTIMAL}),
        ({"b_0_lfu": 0.3}, {OPTIMAL}),
        ({"a_0_workload_aware": 0.1, "a_0_lfu": 0.0}, set()),
    ],
)
def test_each_claim_can_differ(changes: Mapping[str, float], differ: set[int]) -> None:
    assert {
        number for number, claim in enumerate(claims_of(add_claims, made_up(**changes))) if not claim.agrees
    } == differ


@pytest.mark.parametrize("policy", [Lru, Lfu])
@pytest.mark.parametrize("seed", range(10))
def test_without_the_offset_rule_the_head_goes_first(policy: type[Lru[int] | Lfu[int]], seed: int) -> None:
    naive: dict[int, tuple[int, int]] = {}
    """The uses (0 for lru) and the number of the last use of each resident block."""
    cache = HeadFirst(policy(), 7)
    number = 0
    for now, blocks in enumerate(trace(seed, 120)):
        hits = 0
        while hits < len(blocks) and blocks[hits] in naive:
            hits += 1
        assert cache.request(blocks, float(now), Traits()) == hits
        for block in dict.fromkeys(blocks):
            number += 1
            naive[block] = (naive.get(block, (0, 0))[0] + 1 if policy is Lfu else 0, number)
        while len(naive) > 7:
            del naive[min(naive, key=naive.__getitem__)]


def test_the_ablation_has_the_hits_of_replays() -> None:
    given = workload("qwen-a", 4, generated=True)
    result = make("wild-fig28", given)
    capacity = capacity_blocks(QWEN, BLOCK, 1)
    found = {str(row["policy"]): row for row in result.rows}
    names = {
        "WA without ① ③": "workload_aware:fitted=false,life_s=0",
        "WA ①": "workload_aware:life_s=0",
        "WA ① ③": "workload_aware",
    }
    assert {"lru", "gdfs", "belady", "workload_aware:life_s=600", *names} <= set(found)
    for policy, row in found.items():
        cache = replay(given.asked(), names.get(policy, policy), capacity)
        assert row["hit_ratio"] == cache.hit_blocks / cache.blocks
        assert row["over_gdfs"] == row["hit_ratio"] - found["gdfs"]["hit_ratio"]
    assert found["WA without ① ③"]["hit_ratio"] == found["lru"]["hit_ratio"], "age alone decides"
    without = HeadFirst(Lru(), capacity)
    hits = sum(without.request(*asked) for asked in given.asked())
    asked_for = sum(len(row.blocks) for row in given.rows)
    assert found["lru"]["without_offset"] == hits / asked_for
    assert found["lru"]["offset_gives"] == found["lru"]["hit_ratio"] - hits / asked_for


def ablated(*hits: float) -> list[Claim]:
    """Returns the claims for these hit ratios of gdfs, ① and ① ③."""
    named = dict(zip(("gdfs", "WA ①", "WA ① ③"), hits, strict=True)) | {"lru": 0.30}
    named |= {f"workload_aware:life_s={life:g}": 0.35 + life / 1e5 for life in LIVES_S if life != LIFE_S}
    return claims_of(
        add_ablation_claims,
        [
            {"policy": policy, "hit_ratio": ratio, "over_gdfs": ratio - hits[0], "basis": Basis.MEASURED}
            for policy, ratio in named.items()
        ],
    )


def test_what_is_claimed_of_the_ablation_can_agree_and_differ() -> None:
    first, second = ablated(0.31, 0.32, 0.344)
    assert (first.ours, first.printed, first.agrees) == ("+1.0 points", "1 %", True)
    assert (second.ours, second.printed, second.agrees) == ("+2.4 points", "2.4 %", True)
    assert "+2.0 over lru" in first.why
    assert "+3.6 with the best one tried, 600 s" in second.why
    assert [claim.agrees for claim in ablated(0.32, 0.32, 0.32)] == [False, False]
    assert [claim.agrees for claim in ablated(0.31, 0.34, 0.37)] == [False, False]


GIVEN = [workload("qwen-a", 1, generated=True), workload("qwen-b", 2)]


@cache
def queued_ttft() -> Result:
    """Returns the result of the experiment, computed once because it takes a second and a half."""
    return make("wild-qttft", *GIVEN)


def test_queued_ttft_is_of_one_server_that_computes_what_misses() -> None:
    """A request waits for the requests before it, and pays for its own tokens that are not held."""
    for row in queued_ttft().rows:
        (model,) = (each for each in MODELS if each.name == row["model"])
        (each,) = (each for each in GIVEN if each.name == row["workload"])
        token_s, capacity = 1 / computed_per_s(model), max(1, capacity_blocks(model, BLOCK, float(row["ratio"])))
        cache: list[int] = []
        free_s, total_s = 0.0, 0.0
        for request in each.rows:
            held, asked = set(cache), set(request.blocks)
            run = next((at for at, block in enumerate(request.blocks) if block not in held), len(request.blocks))
            free_s = max(free_s, request.time_s)
            free_s += (request.input_tokens - min(run * BLOCK, request.input_tokens - 1)) * token_s
            total_s += free_s - request.time_s
            cache = [block for block in cache if block not in asked] + list(dict.fromkeys(request.blocks))[::-1]
            cache = cache[-capacity:]
        assert row["lru"] == pytest.approx(total_s / len(each.rows))


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
@pytest.mark.parametrize("name", ["wild-fig25", "wild-qttft", "wild-fig28"])
def test_quotes_are_in_the_paper(name: str) -> None:
    text = text_of("wild")
    given = [workload(each, seed) for seed, each in enumerate(FIGURES[name].needs)]
    result = queued_ttft() if name == "wild-qttft" else make(name, *given)
    for claim in result.claims:
        assert plain(claim.said) in text
        if isinstance(claim.printed, str):
            assert claim.printed.replace(" ", "") in text.replace(" ", "")
