from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pinyon.cli import main
from pinyon_lab.cli import trace_generate
from pinyon_lab.traces import TraceFile, TraceRow
from pinyon_lab.traces.generate import DAY_S, PROFILES, generate, profile
from pinyon_lab.traces.generate.profile import Profile

HOUR_S = 3600.0


def run(*arguments: object) -> int:
    return main(["trace", "generate", *map(str, arguments)])


def test_the_file_has_the_rows_of_the_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.jsonl"
    assert run("qwen-a", out, "--seed", 7, "--duration", "10m", "--per-s", 0.5) == 0
    made = dataclasses.replace(profile("qwen-a"), per_s=0.5, duration_s=600.0)
    rows = list(generate(made, 7))
    trace = TraceFile(out)
    assert (trace.format.name, list(trace.rows())) == ("qwen", rows)
    said = capsys.readouterr().err
    assert said.startswith(f"{len(rows):,} requests, {sum(len(row.blocks) for row in rows):,} blocks, ")
    assert "in 10 min: profile qwen-a, seed 7, format qwen" in said
    first = out.read_bytes()
    assert run("qwen-a", out, "--seed", 7, "--duration", "10m", "--per-s", 0.5) == 0
    assert out.read_bytes() == first
    assert run("qwen-a", f"{out}.gz", "--seed", 7, "--duration", "10m", "--per-s", 0.5) == 0
    assert list(TraceFile(tmp_path / "a.jsonl.gz").rows()) == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.gz"]


def test_toolagent_is_written_as_mooncake_writes(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    assert run("toolagent", out, "--duration", "5m", "--per-s", 1) == 0
    trace = TraceFile(out)
    rows = list(trace.rows())
    assert trace.format.name == "mooncake"
    assert {row.kind for row in rows} == {"tool", "chat"}
    assert all(row.user and row.turn for row in rows)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Profile, int]]:
    """The profiles and seeds that the command would generate from; no trace is generated."""
    asked: list[tuple[Profile, int]] = []

    def note(made: Profile, seed: int) -> Iterator[TraceRow]:
        asked.append((made, seed))
        return iter(())

    monkeypatch.setattr(trace_generate, "generate", note)
    return asked


@pytest.mark.parametrize(
    ("duration", "duration_s", "start_s"),
    [
        ("90s", 90.0, 10 * HOUR_S),
        ("1.5h", 5400.0, 10 * HOUR_S),
        ("24h", DAY_S, 0.0),
        ("5d", 5 * DAY_S, 0.0),
        ("31d", 31 * DAY_S, 0.0),
    ],
)
def test_a_day_begins_at_midnight(
    tmp_path: Path, made: list[tuple[Profile, int]], duration: str, duration_s: float, start_s: float
) -> None:
    assert run("qwen-a", tmp_path / "a", "--duration", duration) == 0
    assert made == [(dataclasses.replace(profile("qwen-a"), duration_s=duration_s, start_s=start_s), 1)]


def test_parameters_are_varied(tmp_path: Path, made: list[tuple[Profile, int]]) -> None:
    options = ("--vary", "users=5000", "--vary", "think_s=300.5", "--per-s", "1000", "--seed", (1 << 64) - 1)
    assert run("qwen-a", tmp_path / "a", *options) == 0
    expected = dataclasses.replace(profile("qwen-a", users=5000, think_s=300.5), per_s=1000.0)
    assert made == [(expected, (1 << 64) - 1)]


def test_profiles_are_listed_with_what_can_be_varied(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profiles") == 0
    said = capsys.readouterr().out.splitlines()
    for name, spec in PROFILES.items():
        assert any(line.startswith(f"{name}: ") for line in said)
        for key, free in spec.free.items():
            assert any(line.split()[:4] == [key, f"{free.usual:g}", f"{free.low:g}", f"{free.high:g}"] for line in said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense", "OUT"], "invalid choice: 'nonsense'"),
        (["qwen-a", "OUT", "--duration", "0s"], "not a time up to 31d"),
        (["qwen-a", "OUT", "--duration", "32d"], "not a time up to 31d"),
        (["qwen-a", "OUT", "--duration", "10"], "not a time up to 31d"),
        (["qwen-a", "OUT", "--per-s", "0"], "not a rate above 0 and up to 1,000 per second"),
        (["qwen-a", "OUT", "--per-s", "1001"], "not a rate"),
        (["qwen-a", "OUT", "--per-s", "nan"], "not a rate"),
        (["qwen-a", "OUT", "--per-s", "fast"], "not a rate"),
        (["qwen-a", "OUT", "--seed", "-1"], "not a whole number from 0"),
        (["qwen-a", "OUT", "--seed", str(1 << 64)], "not a whole number from 0"),
        (["qwen-a", "OUT", "--seed", "1.5"], "not a whole number from 0"),
    ],
)
def test_options_that_are_none(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def interrupted(made: Profile, seed: int) -> Iterator[TraceRow]:
        for number, row in enumerate(generate(made, seed)):
            if number == 20:
                assert [path.suffix for path in tmp_path.iterdir()] == [".part"], "on its way, by another name"
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(trace_generate, "generate", interrupted)
    assert run("qwen-b", tmp_path / name, "--per-s", 1) == 130
    assert list(tmp_path.iterdir()) == []


def test_whoever_reads_may_have_enough() -> None:
    """The reader may stop early, as in ``| head -1``: there is no traceback, and no message at the exit."""
    command = [sys.executable, "-c", "import sys; from pinyon.cli import main; sys.exit(main())"]
    arguments = ["trace", "generate", "qwen-b", "-", "--per-s", "1"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"chat_id":')
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
