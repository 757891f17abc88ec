"""``pinyon replay`` sends a trace's requests at their times, and reports as ``pinyon simulate`` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import LocalCluster
from pinyon.cli import main
from tests.cluster.specs import ONE, cluster_spec
from tests.forks import forked

BLOCK = 16


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = cluster_spec(**ONE, block_tokens=BLOCK, pool_blocks=2048, engine="instant")
    with LocalCluster(spec, tmp_path_factory.mktemp("cluster"), forked) as running:
        yield running


def turn(chat: str, parent: str, at_s: float, tokens: int, output: int, blocks: list[int]) -> dict[str, object]:
    return {
        "chat_id": chat, "parent_chat_id": parent or -1, "timestamp": at_s, "input_length": tokens,
        "output_length": output, "type": "text", "turn": 2 if parent else 1, "hash_ids": blocks,
    }  # fmt: skip


def written(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def replayed(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str], trace: str, rows: Path, *more: str, status: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Returns the command's report, its rows of requests, and its text for people."""
    folder = cluster.access.admin
    asked = ["replay", trace, "--lb", cluster.services["lb-0"].endpoints["grpc"], "--warm-up", "0", "--json"]
    asked += ["--tls-dir", str(folder)] if folder else []
    assert main([*asked, "--per-request", str(rows), *more]) == status
    seen = capsys.readouterr()
    told: dict[str, Any] = json.loads(seen.out.splitlines()[-1])
    return told, [json.loads(line) for line in rows.read_text().splitlines()], seen.err


def test_prompts_share_and_turns_go_on(
    running: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hits equal the simulated ones: the second turn reuses the answer, too, but for its last, uncomputed token."""
    rows = [
        turn("a", "", 0.0, 70, 40, [1, 2, 3, 4, 5]),
        turn("x", "", 2.0, 64, 5, [1, 2, 30, 31]),  # the one before ended long ago
        turn("b", "a", 2.1, 150, 9, [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]),
        turn("y", "", 5.0, 150, 9, [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]),
        turn("c", "b", 5.5, 40, 9, [1, 2, 40]),
    ]
    trace = written(tmp_path / "turns.jsonl", rows)
    told, served, err = replayed(running, capsys, trace, tmp_path / "rows.jsonl", "--seed", "7")
    assert [each["output_tokens"] for each in served] == [40, 5, 9, 9, 9]
    assert [each["tokens"] for each in served] == [70, 64, 150, 150, 40]
    assert [each["end"] for each in served] == ["finished"] * 5
    assert [each["hit_tokens"] for each in served] == [0, 32, 96, 144, 32]
    assert "requests:" not in err, "none failed"
    assert served[2]["arrived_s"] >= max(2.1, served[0]["e2e_s"])
    machine = tmp_path / "machine.json"
    machine.write_text(
        json.dumps(
            {
                "source": "", "stated": "", "assumed": "", "engine": "tiny", "kv_token_bytes": 1024, "dram_tokens": 0,
                "hbm_tokens": 2048 * BLOCK, "dram_bytes_s": 1e9, "nic_bytes_s": 1e9, "ssd_bytes_s": 1e9,
            }
        )
    )  # fmt: skip
    simulated = tmp_path / "simulated.jsonl"
    asked = ["simulate", trace, "--model", str(machine), "--instances", "1", "--warm-up", "0", "--json"]
    assert main([*asked, "--per-request", str(simulated)]) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in simulated.read_text().splitlines()]
    assert [each["hit_tokens"] for each in lines] == [each["hit_tokens"] for each in served]
    assert {"attainment", "p90_s", "hit_ratio", "tbt_p50_s", "late_p99_s"} <= told.keys()


def test_a_closed_loop_has_so_many_clients(
    running: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [turn(f"r{number}", "", float(number), 32, 30, [2 * number, 2 * number + 1]) for number in range(12)]
    trace = written(tmp_path / "closed.jsonl", rows)
    told, served, _ = replayed(running, capsys, trace, tmp_path / "rows.jsonl", "--clients", "2", "--seed", "8")
    edges = [(each["arrived_s"], 1) for each in served] + [(each["arrived_s"] + each["e2e_s"], -1) for each in served]
    inside = most = 0
    for _, change in sorted(edges):
        inside += change
        most = max(most, inside)
    assert most <= 2
    assert told["finished"] == 1.0
    assert max(each["arrived_s"] for each in served) < 11.0, "the trace's times do not count"


def test_what_fails_is_said_and_counted(
    running: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        turn("long", "", 0.0, 50_000, 5, list(range(100, 3225))),
        turn("next", "long", 0.0, 32, 5, [100, 101]),
        turn("fine", "", 0.1, 32, 5, [5000, 5001]),
    ]
    trace = written(tmp_path / "long.jsonl", rows)
    more = ("--tokens-max", "60000", "--seed", "9")
    told, served, err = replayed(running, capsys, trace, tmp_path / "rows.jsonl", *more, status=1)
    assert [each["end"] for each in served] == ["invalid_argument", "finished", "finished"]
    assert served[0]["ttft_s"] == -1
    ((text, count),) = told["errors"].items()
    assert text.startswith("INVALID_ARGUMENT: ")
    assert count == 1
    assert "1 requests: " in err
    assert told["attainment"] == pytest.approx(2 / 3)


def test_lengths_are_shrunk(running: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"timestamp": 100 * n, "input_length": 1500, "output_length": 70, "hash_ids": [1, 2, 90 + n]} for n in range(2)
    ]
    trace = written(tmp_path / "long.jsonl", lines)
    more = ("--shrink", "32", "--seed", "10")
    _, served, _ = replayed(running, capsys, trace, tmp_path / "rows.jsonl", *more)
    assert [(each["tokens"], each["output_tokens"], each["hit_tokens"]) for each in served] == [(47, 3, 0), (47, 3, 32)]
    assert main(["replay", trace, "--shrink", "7", "--warm-up", "0"]) == 1
    assert "--shrink must divide the trace's 512 tokens" in capsys.readouterr().err
