from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pinyon.cli import main
from tests.unit.cli.lab_commands import result_of, said, write


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = random.Random(5)
    lines, now_ms = [], 0.0
    for _ in range(300):
        now_ms += rng.expovariate(4.0) * 1000
        blocks = [*range(rng.randint(1, 6)), *(rng.getrandbits(40) for _ in range(rng.randint(1, 5)))]
        tokens = 512 * len(blocks) - rng.randint(0, 500)
        lines.append({"timestamp": now_ms, "input_length": tokens, "output_length": 20, "hash_ids": blocks})
    path = tmp_path_factory.mktemp("traces") / "a.jsonl"
    return write(path, lines)


SHORT = ("--warm-up", "20")


def test_a_machine_is_simulated(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "ttft.svg"
    asked = ["simulate", trace, "--model", "910b-qwen2.5-7b", "--instances", "2", *SHORT, "--pool", "dram"]
    assert main([*asked, "--per-request", str(rows), "--picture", str(picture)]) == 0
    seen = capsys.readouterr()
    first = json.loads(seen.out.splitlines()[-1])
    assert (first["counted"], first["finished"]) == (280, 1.0)
    assert first["effective"] <= min(first["attainment"], first["tbt_attainment"])
    assert "effective: both in time" in seen.err
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [each["request"] for each in written] == list(range(300))
    assert sum(each["hit_tokens"] for each in written[20:]) / sum(
        each["tokens"] for each in written[20:]
    ) == pytest.approx(first["hit_ratio"])
    assert picture.read_text().startswith("<svg")
    assert result_of(capsys, [*asked, "--json"]) == first, "the same arguments give the same numbers"


def test_instances_come_as_the_load_asks_for(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", trace, "--model", "910b-qwen2.5-7b", "--instances", "1", *SHORT, "--rate", "12", "--json"]
    alone = result_of(capsys, asked)
    more = result_of(capsys, [*asked, "--sizes", "1-6"])
    assert alone["instances_used"] == 1
    assert more["instances_used"] in range(2, 7)
    assert more["attainment"] > alone["attainment"]


def test_policies_are_compared(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", trace, "--model", "910b-qwen2.5-7b", "--instances", "3", *SHORT]
    assert main([*asked, "--policy", "random", "--policy", "min_ttft", "--policy", "dualmap:reading=expected"]) == 0
    seen = capsys.readouterr()
    results = json.loads(seen.out.splitlines()[-1])["results"]
    assert [each["policy"] for each in results] == ["random", "min_ttft", "dualmap:reading=expected,seed=0,slo_s=5.0"]
    assert len({each["mean_s"] for each in results}) == 3
    assert max(map(len, seen.err.splitlines())) <= 80
    assert "last ¼: of the last quarter by arrival" in " ".join(seen.err.split())


@pytest.mark.parametrize("split", [(), ("--prefill-instances", "2", "--decode-instances", "1")])
def test_a_plan_is_the_first_size_that_is_enough(
    trace: str, split: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", trace, "--model", "910b-qwen2.5-7b", *SHORT, "--slo", "0.6", "--rate", "16", *split, "--json"]
    result = result_of(capsys, asked)
    sizes = {each["instances"]: each["attainment"] for each in result["tried"]}
    assert sizes[result["instances"]] >= 0.9
    assert sizes[result["instances"] - 1] < 0.9
    assert main([*asked, "--instances-max", "2"]) == 1
    assert "2 instances attain" in capsys.readouterr().err


def test_plan_says_that_no_number_of_instances_helps(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", trace, "--cache-tokens", "100000", "--instances-max", "8", "--json"]
    assert main([*asked, "--slo", "0.3", "--share", "0.99"]) == 1
    message = capsys.readouterr().err
    assert "no number of instances attains 99.0%: even where nobody waits" in message
    assert "of 270 take longer than 0.3 s to compute, up to 0." in message
    # With more instances than may be tried, all requests are in time, so this is another message.
    assert main([*asked, "--slo", "0.9", "--share", "0.99", "--rate", "400"]) == 1
    assert "8 instances attain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "counted"), [((), 270), (("--limit", "5"), 5), (("--warm-up", "0"), 300), (("--warm-up", "299"), 1)]
)
def test_warm_up_leaves_most_of_a_short_trace(
    trace: str, option: tuple[str, ...], counted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", trace, "--instances", "2", "--cache-tokens", "9999", *option, "--json"]) == 0
    assert said(capsys)["counted"] == counted


def test_who_would_have_slow_tokens_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "910b-qwen2.5-7b", *SHORT, "--json")
    asked = ["simulate", trace, *model, "--prefill-instances", "6", "--decode-instances", "1", "--rate", "40"]
    finished = []
    for limit_s in ("1", "0.015"):
        finished += [result_of(capsys, [*asked, "--shed-tbt", limit_s])["finished"]]
    assert finished[0] == 1.0
    assert finished[1] < 0.98


def test_rows_without_a_prompt_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"timestamp": 500 * n, "input_length": n % 2 * 600, "output_length": 5, "hash_ids": [n]} for n in range(40)]
    write(path, rows)
    for model in (("--model", "tiny"), ("--cache-tokens", "4096")):
        assert main(["simulate", str(path), "--warm-up", "0", *model, "--instances", "2", "--json"]) == 0
        assert said(capsys)["requests"] == 20
    write(path, [row | {"input_length": 0} for row in rows])
    assert main(["simulate", str(path), "--model", "tiny", "--instances", "2"]) == 1
    assert "no request of the trace has a prompt" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--model", "\udcff"), ("--api-key", "\u00ff"), ("--token-ids", "3-" + "9" * 5000)])
def test_what_cannot_be_sent_is_said_before_anything_is(
    trace: str, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *SHORT, *option]) == 1
    assert "pinyon: " in capsys.readouterr().err


def test_the_attention_kernel_says_who_gains_by_a_shared_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two conversations run at once: by groups each reads its prefix once; as a whole batch neither does."""
    path = tmp_path / "two.jsonl"
    rows = [
        {"timestamp": number, "input_length": 4096, "output_length": 400}
        | {"hash_ids": [*range(number % 2 * 8, number % 2 * 8 + 7), 100 + number]}
        for number in range(16)
    ]
    write(path, rows)
    means = {}
    for kernel in ("whole", "grouped"):
        asked = ["simulate", str(path), "--model", "rtx6000ada-llama-8b", "--instances", "1", "--warm-up", "0"]
        means[kernel] = result_of(capsys, [*asked, "--attention-kernel", kernel, "--json"])["tbt_p50_s"]
    assert means["grouped"] < 0.97 * means["whole"]
