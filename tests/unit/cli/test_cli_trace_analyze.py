from __future__ import annotations

import gzip
import json
import xml.dom.minidom
from pathlib import Path

import pytest

from pinyon.cli import main
from pinyon_lab.traces import TraceFile
from pinyon_lab.traces.analysis import FIGURES
from tests.unit.cli import lab_commands
from tests.unit.cli.lab_commands import qwen


def lines() -> list[str]:
    return [json.dumps(row) for row in qwen()]


def write(folder: Path, *rows: str) -> str:
    return lab_commands.write(folder / "trace.jsonl", rows)


def test_json_of_all_figures_with_broken_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, *lines()[:30], "{", "[" * 9999, *lines()[30:], '{"timestamp": "x"}')
    assert main(["trace", "analyze", trace, "--json"]) == 0
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    result = json.loads(line)
    assert (result["requests"], result["block_tokens"], result["broken_rows"]) == (60, 16, 3)
    assert result["broken_reasons"][0].startswith("line 31: ")
    assert "3 broken rows" in printed.err
    assert [each["figure"] for each in result["figures"]] == list(FIGURES)
    four = result["figures"][0]
    assert (four["blocks"], four["hit_blocks"]) == (120, 60)


def test_tables_pictures_and_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mooncake = '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'
    out = tmp_path / "made" / "here"
    assert main(["trace", "analyze", write(tmp_path, mooncake, mooncake), "--figure", "9,4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "50.00%" in shown
    assert "blocks of 512 tokens" in shown
    assert "Fig. 9: turns: left out" in shown
    assert sorted(path.name for path in out.iterdir()) == ["analysis.json", "fig4.svg"]
    figures = json.loads((out / "analysis.json").read_text())["figures"]
    assert [each["figure"] for each in figures] == ["4", "9"]
    assert "no chats" in figures[1]["left_out"]


def test_types_are_anybodys_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The type may hold markup, or characters that a terminal or XML does not accept."""
    rows = [json.dumps(json.loads(line) | {"type": "[/bold]<&\x1b\ud800"}) for line in lines()]
    assert main(["trace", "analyze", write(tmp_path, *rows), "--out", str(tmp_path / "out")]) == 0
    assert "[/bold]<&??/1" in capsys.readouterr().out
    xml.dom.minidom.parse(str(tmp_path / "out" / "fig18.svg"))


def test_a_trace_without_blocks_has_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    azure = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,374,44")
    assert main(["trace", "analyze", write(tmp_path, *azure), "--json", "--figure", "4,21"]) == 0
    four, sizes = json.loads(capsys.readouterr().out)["figures"]
    assert four["left_out"] == "the trace has no blocks"
    assert sizes["sizes"][0]["mean_tokens"] == 418


def test_scale_keeps_whole_users_and_lines_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = write(tmp_path, *lines()[:9], "{", *lines()[9:]), tmp_path / "less.jsonl.gz"
    scale = ["trace", "scale", trace, str(out), "--factor", "0.3"]
    assert main([*scale, "--seed", "4"]) == 0
    told = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (told["rows"], told["kept_rows"], told["by"]) == (60, 18, "user")
    kept = gzip.decompress(out.read_bytes())
    assert set(kept.decode().splitlines()) <= set(lines())
    users = [row.user for row in TraceFile(out).rows()]
    assert len(users) == 18
    assert all(users.count(user) == 6 for user in users)
    assert main([*scale, "--seed", "4"]) == 0
    assert gzip.decompress(out.read_bytes()) == kept
    assert main([*scale, "--seed", "5"]) == 0
    assert gzip.decompress(out.read_bytes()) != kept


def test_scale_keeps_a_header(tmp_path: Path) -> None:
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens", *[f"2023-11-16 18:15:{at}.5,{at},4" for at in range(10, 30)]]
    out = tmp_path / "less.csv"
    assert main(["trace", "scale", write(tmp_path, *azure), str(out), "--factor", "0.5"]) == 0
    assert out.read_text().splitlines()[0] == azure[0]
    assert len(list(TraceFile(out).rows())) == 10


def test_scale_may_keep_whole_sessions(tmp_path: Path) -> None:
    by_session = ["--factor", "0.5", "--by", "session"]
    assert main(["trace", "scale", write(tmp_path, *lines()), str(tmp_path / "out"), *by_session]) == 0
