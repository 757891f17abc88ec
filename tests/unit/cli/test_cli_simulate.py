from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pinyon.cli import main


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
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


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
    assert main([*asked, "--json"]) == 0
    assert said(capsys) == first, "the same arguments give the same numbers"


def test_instances_come_as_the_load_asks_for(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", trace, "--model", "910b-qwen2.5-7b", "--instances", "1", *SHORT, "--rate", "12", "--json"]
    assert main(asked) == 0
    alone = said(capsys)
    assert main([*asked, "--sizes", "1-6"]) == 0
    more = said(capsys)
    assert alone["instances_used"] == 1
    assert more["instances_used"] in range(2, 7)
    assert more["attainment"] > alone["attainment"]  # type: ignore[operator]


def test_policies_are_compared(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", trace, "--model", "910b-qwen2.5-7b", "--instances", "3", *SHORT]
    assert main([*asked, "--policy", "random", "--policy", "min_ttft", "--policy", "dualmap:reading=expected"]) == 0
    seen = capsys.readouterr()
    results = json.loads(seen.out.splitlines()[-1])["results"]
    assert [each["policy"] for each in results] == ["random", "min_ttft", "dualmap:reading=expected,seed=0,slo_s=5.0"]
    assert len({each["mean_s"] for each in results}) == 3
    assert max(map(len, seen.err.splitlines())) <= 80
    assert "last ¼: of the last quarter by arrival" in " ".join(seen.err.split())
    assert main([*asked, "--policy", "random", "--policy", "random"]) == 1
    assert "named twice" in capsys.readouterr().err


@pytest.mark.parametrize("split", [(), ("--prefill-instances", "2", "--decode-instances", "1")])
def test_a_plan_is_the_first_size_that_is_enough(
    trace: str, split: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", trace, "--model", "910b-qwen2.5-7b", *SHORT, "--slo", "0.6", "--rate", "16", *split, "--json"]
    assert main(asked) == 0
    result = json.loads(capsys.readouterr().out)
    sizes = {each["instances"]: each["attainment"] for each in result["tried"]}
    assert sizes[result["instances"]] >= 0.9
    assert sizes[result["instances"] - 1] < 0.9
    assert main([*asked, "--instances-max", "2"]) == 1
    assert "2 instances attain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "missing"),
    [("plan", ""), ("compare", "--instances is missing; "), ("simulate", "--instances is missing; ")],
)
def test_all_missing_options_are_named_at_once(
    trace: str, command: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, trace]) == 1
    assert f"pinyon: {missing}prefill-reference has no memory of its own: give" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "h100", "--instances", "2"), "no such profile; known: 910b"),
        (("--model", "tiny"), "--instances, or --prefill-instances and --decode-instances, is missing"),
        (("--model", "tiny", "--prefill-instances", "2"), "go together"),
        (("--model", "tiny", "--instances", "2", "--pipeline", "2"), "--pipeline is of --prefill-instances"),
        (("--model", "tiny", "--instances", "2", "--order", "longest"), "known: fifo, shortest_in_time"),
        (("--model", "tiny", "--instances", "2", "--shrink", "3"), "--shrink must divide the trace's 512 tokens"),
        (("--model", "tiny", "--instances", "2", "--batching", "no"), "known: fcfs"),
        (("--model", "tiny", "--instances", "2", "--sizes", "4-2"), "LEAST-MOST"),
        (("--model", "tiny", "--instances", "2", "--cache-tokens", "100"), "at least one block of 512"),
        (("--model", "tiny", "--instances", "2", "--utilisation", "2"), "--utilisation must be from 0.001 to 1"),
        (("--instances", "2"), "pinyon: prefill-reference has no memory of its own: give --cache-tokens, or a --model"),
        (("--cache-tokens", "1024"), "--instances is missing\n"),
        ((), "--instances is missing; prefill-reference has no memory of its own: give --cache-tokens, or a --model"),
        (("--tokens-max", "0"), "--tokens-max must be from 1 to 2,147,483,648, got 0"),
        (
            ("--instances", "2", "--cache-tokens", "1024", "--pool", "dram", "--pool-tokens", "512"),
            "a pool of DRAM is the caches of",
        ),
        (("--instances", "2", "--cache-tokens", "1024", "--pool-tokens", "512"), "--pool-tokens is of a --pool"),
        (
            ("--instances", "2", "--cache-tokens", "1024", "--pipeline", "7"),
            "--pipeline is of models of whole machines",
        ),
        (("--instances", "2", "--cache-tokens", "1024", "--sizes", "1-3"), "--sizes is of models of whole machines"),
        (("--instances", "2", "--cache-tokens", "1024", "--steps", "prefill_first"), "--steps is of models"),
        (("--instances", "1" + "0" * 400, "--cache-tokens", "1024"), "--instances must be from"),
        (("--model", "tiny", "--instances", "2", "--sizes", "1-" + "9" * 5000), "LEAST-MOST"),
        (("--model", "tiny", "--instances", "2", "--pool", "ssd", "--pool-tokens", "511"), "at least one block of 512"),
        (("--model", "tiny", "--instances", "2", "--clients", "2", "--rate", "9"), "there is no --rate"),
        (("--instances", "2", "--cache-tokens", "1024", "--policy", "best"), "known: "),
        (("--instances", "2", "--cache-tokens", "1024", "--picture", "nowhere/a.svg"), "cannot write nowhere/a.svg"),
        (
            ("--instances", "2", "--cache-tokens", "1024", "--warm-up", "300"),
            "none of the trace's 300 requests to count",
        ),
    ],
)
def test_what_makes_no_sense_is_said(
    trace: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", trace, *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--sizes", "2-4"), ("--clients", "3")])
def test_a_plan_of_what_has_no_size_or_no_rate_is_refused(
    trace: str, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", trace, *SHORT, "--model", "tiny", *option]) == 1
    assert f"{option[0]} is of simulate" in capsys.readouterr().err


def test_who_would_have_slow_tokens_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "910b-qwen2.5-7b", *SHORT, "--json")
    asked = ["simulate", trace, *model, "--prefill-instances", "6", "--decode-instances", "1", "--rate", "40"]
    finished = []
    for limit_s in ("1", "0.015"):
        assert main([*asked, "--shed-tbt", limit_s]) == 0
        finished.append(said(capsys)["finished"])
    assert finished[0] == 1.0
    assert finished[1] < 0.98  # type: ignore[operator]
    wrong = ("--shed-tbt", "0.02", "--instances", "2", "--cache-tokens", "9999")
    for command in (["simulate", trace, *wrong], ["compare", trace, *wrong]):
        assert main(command) == 1
        assert "--shed-tbt is of models of whole machines" in capsys.readouterr().err
    assert main(["plan", trace, "--shed-tbt", "0.02", "--cache-tokens", "9999"]) == 1
    assert "--shed-tbt is of models of whole machines" in capsys.readouterr().err
    assert main([*asked, "--shed-tbt", "0"]) == 1
    assert "--shed-tbt must be from 1e-06" in capsys.readouterr().err


def test_rows_without_a_prompt_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"timestamp": 500 * n, "input_length": n % 2 * 600, "output_length": 5, "hash_ids": [n]} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for model in (("--model", "tiny"), ("--cache-tokens", "4096")):
        assert main(["simulate", str(path), "--warm-up", "0", *model, "--instances", "2", "--json"]) == 0
        assert said(capsys)["requests"] == 20
    path.write_text("".join(json.dumps(row | {"input_length": 0}) + "\n" for row in rows))
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
        {
            "timestamp": number,
            "input_length": 4096,
            "output_length": 400,
            "hash_ids": [*range(8 * each, 8 * each + 7), 100 + number],
        }
        for number in range(16)
        for each in [number % 2]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    means = {}
    for kernel in ("whole", "grouped"):
        asked = ["simulate", str(path), "--model", "rtx6000ada-llama-8b", "--instances", "1", "--warm-up", "0"]
        assert main([*asked, "--attention-kernel", kernel, "--json"]) == 0
        means[kernel] = json.loads(capsys.readouterr().out.splitlines()[-1])["tbt_p50_s"]
    assert means["grouped"] < 0.97 * means["whole"]
