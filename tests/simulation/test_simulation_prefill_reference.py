"""``pinyon simulate --model prefill-reference`` against a second, plain version of the same rules, row by row."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching.service_order import FifoOrder
from pinyon.cli.main import main
from pinyon.eviction import Traits
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon_lab.simulator.prefill_reference import PrefillReference, ReferenceSettings
from pinyon_lab.simulator.report import ServedRequest, report
from pinyon_lab.simulator.workload import Arrival, at_rate, cut
from pinyon_lab.traces import TraceFile, TraceRow
from tests.long import usually
from tests.simulation import plain_prefill as plain
from tests.simulation.leftovers import check_reference

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
POLICIES = {"least_loaded": "least_loaded", "min_ttft": "min_ttft", "preble": "preble:combined=false"}
CLOSE_S = 1e-9


def chains(rng: Random, count: int, tokens_max: int) -> list[tuple[float, int, tuple[int, ...]]]:
    """Returns prompts that share beginnings; now and then, many arrive at one time."""
    asked: list[tuple[int, ...]] = [()]
    ids, rows, now_s = 0, [], 0.0
    for _ in range(count):
        now_s += rng.choice((0.0, 0.0, 0.01, 0.1, 1.0))
        known = rng.choice(asked[-20:])
        kept = known[: rng.randint(0, len(known))]
        new = range(ids, ids + rng.randint(0 if kept else 1, 5))
        ids = new.stop
        blocks = (*kept, *new)
        tokens = rng.randint((len(blocks) - 1) * plain.BLOCK + 1, len(blocks) * plain.BLOCK)
        if new:
            asked.append(blocks)
        rows.append((now_s, min(tokens, tokens_max), blocks[: -(-min(tokens, tokens_max) // plain.BLOCK)]))
    rows.append((now_s + 1.0, 1, (ids,)))
    return rows


def compare(rows: list[tuple[float, int, tuple[int, ...]]], policy: str, instances: int, cache: int) -> None:
    arrivals = [Arrival(time_s, tokens, 0, blocks, Traits()) for time_s, tokens, blocks in rows]
    cluster = PrefillReference(
        ReferenceSettings(instances, cache), PLACEMENT_POLICIES.make(POLICIES[policy]), FifoOrder
    )
    ours = cluster.run(arrivals)
    theirs = plain.simulate([plain.Row(*row) for row in rows], policy, instances, cache)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine.instance, mine.hit_tokens) == (other.instance, other.hit_tokens), f"request {number}"
        assert math.isclose(mine.ttft_s, other.ttft_s, abs_tol=CLOSE_S), f"request {number}"


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=usually(10, long=40), deadline=None)
@given(seed=st.integers(0, 1 << 32), instances=st.integers(1, 5), cache_blocks=st.integers(1, 60))
def test_every_row_is_that_of_the_plain_rules(policy: str, seed: int, instances: int, cache_blocks: int) -> None:
    compare(chains(Random(seed), 120, 4000), policy, instances, cache_blocks * plain.BLOCK)


@pytest.fixture(scope="module")
def public() -> list[tuple[float, int, tuple[int, ...]]]:
    path = SHARED / "mooncake_conversation.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    arrivals = at_rate(cut(TraceFile(path).sorted_rows(usually(350, long=2500)), 512, 20_480), 9.0)
    return [(each.time_s, each.tokens, each.blocks) for each in arrivals]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_public_trace_row_by_row(policy: str, public: list[tuple[float, int, tuple[int, ...]]]) -> None:
    compare(public, policy, 8, 1_000_000)


def test_times_are_scaled_from_the_first_to_the_last() -> None:
    rows = chains(Random(1), 50, 4000)
    arrivals = [Arrival(time_s + 7.0, tokens, 0, blocks, Traits()) for time_s, tokens, blocks in rows]
    scaled = at_rate(arrivals, 4.0)
    assert scaled[0].time_s == 0.0
    assert scaled[-1].time_s == pytest.approx(len(rows) / 4.0)
    assert [each.time_s for each in scaled] == pytest.approx([row.time_s for row in plain.cut(rows, 4.0)])


def test_at_one_time_what_ends_comes_before_what_arrives() -> None:
    """The second request starts at once where the first just ended, so requests that come with it know its rest."""
    end_s = 2000 * 127 * 1e-6
    prompts = [(0.0, 2000, (1, 2, 3, 4)), (end_s, 2000, (1, 2, 3, 4)), (end_s, 1000, (1, 9))]
    arrivals = [Arrival(time_s, tokens, 0, blocks, Traits()) for time_s, tokens, blocks in prompts]
    settings_ = ReferenceSettings(2, 2 * plain.BLOCK)
    served = PrefillReference(settings_, PLACEMENT_POLICIES.make("min_ttft"), FifoOrder).run(arrivals)
    assert [each.instance for each in served] == [0, 0, 1]
    assert [each.hit_tokens for each in served] == [0, 1024, 0]


def test_waits_at_one_server_match_the_md1_formula() -> None:
    """The simulated waits follow Lindley's recursion, whose mean is that of M/D/1.

    Each of 6,000 requests waits for the one before it: w' = max(0, w + s - gap). The mean of 100,000 such waits
    (300,000 in a long run) is rho s / 2 (1 - rho)."""
    tokens, load = 500, 0.7
    service_s = tokens * plain.TOKEN_S

    def gaps_and_waits(seed: int, count: int) -> list[tuple[float, float]]:
        rng, wait_s, found = Random(seed), 0.0, []
        for _ in range(count):
            gap_s = rng.expovariate(load / service_s)
            wait_s = max(0.0, wait_s + service_s - gap_s) if found else 0.0
            found.append((gap_s, wait_s))
        return found

    expected, now_s, arrivals = gaps_and_waits(0, 6_000), 0.0, []
    for number, (gap_s, _) in enumerate(expected):
        now_s += gap_s
        arrivals.append(Arrival(now_s, tokens, 0, (number,), Traits()))
    served = PrefillReference(ReferenceSettings(1, 512), PLACEMENT_POLICIES.make("random"), FifoOrder).run(arrivals)
    waits = [each.ttft_s - service_s for each in served]
    assert waits == pytest.approx([wait_s for _, wait_s in expected], abs=1e-6)
    many = [wait_s for _, wait_s in gaps_and_waits(1, usually(100_000, long=300_000))]
    assert sum(many) / len(many) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.03)


@settings(max_examples=usually(5, long=30), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_every_request_ends_once_under_every_policy(seed: int) -> None:
    rows = chains(Random(seed), 60, 4000)
    arrivals = [Arrival(time_s * 0.05, tokens, 0, blocks, Traits()) for time_s, tokens, blocks in rows]
    for name in PLACEMENT_POLICIES.names:
        policy = PLACEMENT_POLICIES.with_default(name, "seed", seed)
        runs = []
        for _ in range(2):
            settings_ = ReferenceSettings(3, 20 * plain.BLOCK, slo_s=0.5, seed=seed)
            cluster = PrefillReference(settings_, PLACEMENT_POLICIES.make(policy), FifoOrder)
            runs.append(cluster.run(arrivals))
            check_reference(cluster)
        assert runs[0] == runs[1], f"{name}: the same seed, another run"
        assert len(runs[0]) == len(arrivals)


def test_what_the_report_counts() -> None:
    served = [
        ServedRequest(float(number), 0, float(number), 1.0 + number, 10 * (number + 1), number) for number in range(10)
    ]
    found = report(served, slo_s=8.0, warm_up=2)
    assert (found["requests"], found["counted"]) == (10, 8)
    assert found["attainment"] == 6 / 8
    assert found["attainment_last_quarter"] == 0.0
    assert found["attainment_longest_tenth"] == 0.0
    assert (found["p50_s"], found["p90_s"], found["p99_s"]) == (7.0, 10.0, 10.0)
    assert found["hit_ratio"] == sum(range(2, 10)) / sum(range(30, 110, 10))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for time_s, tokens, blocks in chains(Random(3), 200, 4000):
            row = {"timestamp": int(time_s * 1000), "input_length": tokens, "output_length": 1, "hash_ids": blocks}
            file.write(json.dumps(row) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], trace: Path, *arguments: str) -> dict[str, object]:
    common = ["--instances", "3", "--cache-tokens", "20000", "--warm-up", "20"]
    assert main(["simulate", str(trace), *common, *arguments]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_the_command(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, policy: str) -> None:
    rows = tmp_path / "rows.jsonl"
    asked_for = ["--order", "fifo", "--rate", "5", "--policy", policy, "--per-request", str(rows), "--json"]
    found = run(capsys, trace, *asked_for)
    asked = [(row.time_s, row.input_tokens, row.blocks) for row in TraceFile(trace).rows()]
    expected = plain.report(plain.simulate(plain.cut(asked, 5.0), policy, 3, 20_000), warm_up=20)
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line["request"] for line in lines] == list(range(201))
    assert sum(line["ttft_s"] for line in lines[20:]) / 181 == pytest.approx(found["mean_s"])


def test_goodput_is_a_rate_that_is_enough_and_more_is_not(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    found = run(capsys, trace, "--goodput", "0.9", "--slo", "1")
    rate = found["rate"]
    assert isinstance(rate, float)
    assert isinstance(found["attainment"], float)
    assert found["attainment"] >= 0.9
    more = run(capsys, trace, "--rate", str(rate * 1.01), "--slo", "1")
    assert isinstance(more["attainment"], float)
    assert more["attainment"] < 0.9


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--instances", "0"], "--instances"),
        (["--cache-tokens", "511"], "--cache-tokens"),
        (["--rate", "0"], "--rate"),
        (["--goodput", "2"], "--goodput"),
        (["--policy", "nonsense"], "known: kvcache_centric"),
        (["--policy", "dualmap:choice=best"], "must be one of slo"),
        (["--order", "lifo"], "known: fifo"),
        (["--eviction", "x"], "known: lru"),
        (["--warm-up", "201"], "--warm-up"),
        (["--per-request", "/nowhere/rows"], "cannot write"),
    ],
)
def test_what_is_wrong_is_said(
    capsys: pytest.CaptureFixture[str], trace: Path, arguments: list[str], word: str
) -> None:
    common = ["--instances", "3", "--cache-tokens", "20000", "--warm-up", "20"]
    assert main(["simulate", str(trace), *common, *arguments]) != 0
    assert word in " ".join(capsys.readouterr().err.split())


def test_rounding_decides_neither_order_nor_lateness() -> None:
    """The third request ends within 2e-16 s of the fourth's arrival; the last request takes 5 s to within 1e-14 s."""
    rows = [
        (0.0, 2048, (90, 91, 92, 93)),
        (0.0, 100, (0,)),
        (0.200072, 11264, tuple(range(1, 23))),
        (1.6306, 100, (0,)),
    ]
    arrivals = [Arrival(time_s, tokens, 0, blocks, Traits()) for time_s, tokens, blocks in rows]
    cluster = PrefillReference(ReferenceSettings(2, 512), PLACEMENT_POLICIES.make("min_ttft"), FifoOrder)
    assert cluster.run(arrivals)[3].instance == 0
    late = [(0.0, 512), (110.0, 20_000), (110.08, 20_000)]
    ids = itertools.count(1000)
    apart = [
        Arrival(time_s, tokens, 0, tuple(itertools.islice(ids, -(-tokens // 512))), Traits()) for time_s, tokens in late
    ]
    served = PrefillReference(ReferenceSettings(1, 100_000), PLACEMENT_POLICIES.make("min_ttft"), FifoOrder).run(apart)
    assert served[2].ttft_s == pytest.approx(5.0)
    assert report(served, 5.0, 0)["attainment"] == 1.0


def test_ids_that_a_prompt_is_too_short_for_are_left_out() -> None:
    (arrival,) = cut([TraceRow(0.0, 512, 1, (1, 2, 3))], 512, 20_480)
    assert arrival.blocks == (1,)
