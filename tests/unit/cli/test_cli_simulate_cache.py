from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pinyon.cli import main
from tests.unit.cli import lab_commands
from tests.unit.cli.lab_commands import result_of, said

SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces"


def write(folder: Path, *blocks: list[int]) -> str:
    return lab_commands.write(folder / "trace.jsonl", lab_commands.mooncake(*blocks))


def test_the_last_line_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 1 and 2 | 1 hits, 3 is new | 4, 5: the deepest of those used longest ago goes, 2 | 1 hits, 2 does not
    trace = write(tmp_path, [1, 2], [1, 3], [4, 5], [1, 2])
    assert main(["simulate-cache", trace, "--policy", "lru", "--capacity", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert len(lines) > 1
    assert (result["requests"], result["blocks"], result["unique_blocks"]) == (4, 8, 5)
    assert (result["hit_blocks"], result["hit_ratio"]) == (2, 0.25)
    assert main(["simulate-cache", trace, "--policy", "belady", "--capacity", "4", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["hit_blocks"] == 3, "it knows that 2 comes again"
    assert main(["simulate-cache", trace, "--policy", "belady", "--capacity", "4", "--json", "--limit", "3"]) == 0
    assert said(capsys)["requests"] == 3


def test_a_pool_says_what_its_nodes_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, [1, 2], [3], [1, 2, 4], [3, 5])
    asked = ["simulate-cache", trace, "--capacity", "4", "--nodes", "2"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    found = [result[key] for key in ("nodes", "router", "hit_blocks", "hit_ratio")]
    assert found == [2, "cache_affinity", 3, 0.375]
    nodes = [(node["requests"], node["blocks"], node["hit_blocks"]) for node in result["per_node"]]
    assert nodes == [(2, 5, 2), (2, 3, 1)]
    assert "node  requests" in "".join(lines)
    assert main([*asked, "--router", "global", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["hit_blocks"], json.loads(line)["per_node"]) == (3, [])
    result = result_of(capsys, [*asked, "--router", "round_robin", "--last-copies", "--json"])
    assert (result["last_copies"], result["hit_blocks"], result["duplicate_blocks"]) == (8, 3, 0)


def test_a_second_tier_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 1 2 | 3 4: these move down | 1 comes up, 4 goes down for it, 3 for 5 | 2 comes up, 5 goes down | 6: of both tiers
    # 4 was used longest ago and is lost, 1 goes down | 3 comes up, 2 goes down; 4: 5 is lost, 6 goes down
    trace = write(tmp_path, [1, 2], [3, 4], [1, 5], [2], [6], [3, 4])
    assert main(["simulate-cache", trace, "--capacity", "2", "--dram", "3"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert "in the second tier" in out
    assert (result["blocks"], result["hit_blocks"], result["dram_hit_blocks"]) == (10, 3, 3)
    assert (result["evicted_blocks"], result["dram_blocks"], result["swapped_out_blocks"]) == (2, 3, 8)


@pytest.mark.parametrize("split", [(40, 60), (90, 10)], ids=str)
def test_two_tiers_hit_like_one_cache_of_their_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: tuple[int, int]
) -> None:
    rng = random.Random(5)
    rows = [[user * 100 + depth for depth in range(rng.randrange(1, 12))] for user in rng.choices(range(30), k=400)]
    trace = write(tmp_path, *rows)
    one = result_of(capsys, ["simulate-cache", trace, "--capacity", "100", "--json"])
    two = result_of(capsys, ["simulate-cache", trace, "--capacity", str(split[0]), "--dram", str(split[1]), "--json"])
    assert two["hit_blocks"] == one["hit_blocks"] > 500
    assert two["dram_hit_blocks"] == two["swapped_in_blocks"] > 20
    # Each block that moved down came up, was lost, or is still there.
    assert 0 <= two["swapped_out_blocks"] - two["swapped_in_blocks"] <= two["evicted_blocks"] + split[1]


def test_broken_rows_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, [1], [1])
    Path(trace).write_text(Path(trace).read_text() + '{"timestamp": 1}\n' * 12)
    assert main(["simulate-cache", trace, "--capacity", "4", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["broken_rows"] == 12
    assert "12 broken rows" in captured.err
    assert "line 3: input_length is no count" in captured.err
    assert captured.err.splitlines()[-1].strip() == "..."


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(("name", "ideal"), [("mooncake_conversation", 0.3664), ("mooncake_synthetic", 0.6396)])
def test_a_cache_without_end_has_the_ideal_ratio(name: str, ideal: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate-cache", str(SHARED / f"{name}.jsonl.gz"), "--capacity", str(1 << 40), "--json"]) == 0
    assert said(capsys)["hit_ratio"] == pytest.approx(ideal, abs=5e-5)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(("router", "hits"), [("global", 103511), ("coldest", 103511), ("round_robin", 30047)])
def test_ten_nodes_of_three_million_tokens(router: str, hits: int, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(SHARED / "mooncake_conversation.jsonl.gz")
    assert main(["simulate-cache", trace, "--capacity", "5859", "--nodes", "10", "--router", router, "--json"]) == 0
    assert said(capsys)["hit_blocks"] == hits
