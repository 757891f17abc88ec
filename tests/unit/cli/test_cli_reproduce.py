from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pinyon.cli import main
from pinyon_lab.papers import ELSEWHERE, FIGURES, NOT_MADE, SOURCES
from tests.unit.cli.lab_commands import result_of
from tests.unit.cli.test_cli_simulate_cache import write


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    for name in ("conversation", "synthetic", "qwen-a", "qwen-b"):
        made = Path(write(tmp_path, [1, 2], [1, 2, 3], [4]))
        made.rename(tmp_path / f"{SOURCES[name].stem}.jsonl")
    return tmp_path


def test_the_list_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*FIGURES, *SOURCES, *ELSEWHERE))
    listed = result_of(capsys, ["reproduce", "--list", "--json"])
    assert [each["name"] for each in listed["figures"]] == list(FIGURES)
    assert [each["command"] for each in listed["elsewhere"]] == [each.command for each in ELSEWHERE.values()]
    assert [each["why"] for each in listed["not_made"]] == [each.why for each in NOT_MADE]


@pytest.mark.parametrize(("paper", "last"), [("Mooncake", 15), ("DualMap", 15), ("KVCache", 29), ("SkyWalker", 10)])
def test_every_figure_of_a_paper_is_in_the_list(paper: str, last: int) -> None:
    told = [each.section for each in (*FIGURES.values(), *ELSEWHERE.values()) if each.paper.startswith(paper)]
    told += [each.figures for each in NOT_MADE if each.paper.startswith(paper)]
    found: set[int] = set()
    for text in told:
        for numbers in re.findall(r"Figs?\. ([^§T]*)", text):
            for low, high in re.findall(r"(\d+)[a-z]?(?: to (\d+))?", numbers):
                found.update(range(int(low), int(high or low) + 1))
    assert found == set(range(1, last + 1))


@pytest.mark.parametrize("name", ["mooncake-fig9", "mooncake-fig10", "wild-fig25", "wild-fig28"])
def test_a_figure_is_shown_and_written(name: str, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = traces / "made" / "here"
    assert main(["reproduce", name, "--traces", str(traces), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "  paper: " in shown
    assert "…" not in shown, "nothing is cut off, however narrow the terminal is"
    assert "by construction" not in shown
    written = json.loads((out / f"{name}.json").read_text())
    assert {"requests": 3, "generated": False} in written["workloads"].values()
    assert written["rows"][0]["basis"] == "measured"
    assert (out / f"{name}.svg").read_text().startswith("<svg")
    assert main(["reproduce", name, "--traces", str(traces), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == written


def test_a_trace_may_be_named(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [7, 8]}
    for named in (True, False):
        made = traces / "mine"
        made.write_text(json.dumps({**row, **({"user_id": "7"} if named else {})}) + "\n")
        arguments = ["reproduce", "mooncake-fig9", "--traces", str(traces), "--trace", f"toolagent={made}", "--json"]
        result = result_of(capsys, arguments)
        assert result["workloads"]["toolagent"] == {"requests": 1, "generated": named}
        assert len(result["rows"]) == 7, "three, three pairs, all"
        generated = [row["workload"] for row in result["rows"] if row["basis"] == "by construction"]
        assert len(generated) == (4 if named else 0)


def test_traces_that_are_of_no_use_are_named(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reproduce", "mooncake-fig9", "--traces", str(traces), "--trace"]
    broken = traces / "broken"
    broken.write_text('{"hash_ids": 3}\n')
    assert main([*arguments, f"toolagent={broken}"]) == 1
    assert "has no rows that can be read" in capsys.readouterr().err
    broken.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert main([*arguments, f"toolagent={broken}"]) == 1
    assert "has no blocks" in capsys.readouterr().err
    assert main([*arguments, f"toolagent={traces / 'none'}"]) == 1
    assert "no trace file at" in capsys.readouterr().err
    assert main([*arguments[:-1], "--out", str(broken)]) == 1
    assert "cannot write to" in capsys.readouterr().err
