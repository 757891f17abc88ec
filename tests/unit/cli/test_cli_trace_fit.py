from __future__ import annotations

import json
from pathlib import Path

import pytest

from pinyon.cli import main
from pinyon.eviction.day_fits import DayFits
from pinyon.eviction.fit import Fit
from tests.unit.cli import lab_commands
from tests.unit.cli.lab_commands import result_of

Row = tuple[float, str, list[int]]


def write(path: Path, rows: list[Row]) -> str:
    lines = [
        {"timestamp": at, "input_length": 16 * len(ids), "output_length": 1, "hash_ids": ids}
        | {"chat_id": number, "parent_chat_id": -1, "type": kind, "turn": 1}
        for number, (at, kind, ids) in enumerate(rows)
    ]
    return lab_commands.write(path, lines)


def chats(start_s: float) -> list[Row]:
    """Returns requests of chats, which come again after a minute, and of files, which never do."""
    found: list[Row] = []
    for number in range(20):
        at, first = start_s + 100 * number, int(1000 * (start_s + number))
        chat = [*range(first, first + 10)]
        found += [(at, "chat", chat), (at + 1, "file", [*range(first + 100, first + 130)]), (at + 60, "chat", chat)]
    return found


def test_yesterday_is_written_and_used_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = write(tmp_path / "a.jsonl", chats(5.0)), tmp_path / "fits.json"
    told = result_of(capsys, ["trace", "fit", trace, str(out), "--begins", "9:40"])
    assert (told["hours"], told["fits"], told["block_tokens"]) == (2, 4, 16)
    day = DayFits.of_json(out.read_text())
    assert [*day.hours] == [9, 10]
    assert day.hours[9]["chat/1"] == Fit(0.5, 60.0)
    assert set(day.hours[9]) == {"", "chat/1"}, "too little is known of files"

    today = write(tmp_path / "b.jsonl", chats(1_000_005.0))
    asked = ["simulate-cache", today, "--capacity", "30", "--json", "--policy"]
    hits = {}
    midnight_s = 1_000_000 - 9 * 3600 - 40 * 60
    file = write_fits(tmp_path, {"": Fit(0.3, 60.0), "chat/1": Fit(0.5, 60.0), "file/1": Fit(0.001, 60.0)})
    for options in ("fitted=false", f"fits={file},fitted=false,midnight_s={midnight_s}"):
        policy = f"workload_aware:{options}"
        result = result_of(capsys, [*asked, policy])
        assert result["policy"] == policy
        hits[options[:4]] = result["hit_blocks"]
    assert hits == {"fitt": 0, "fits": 200}, "a file's blocks are younger and more than there is room for"


def write_fits(folder: Path, fits: dict[str, Fit]) -> Path:
    path = folder / "known.json"
    path.write_text(json.dumps(DayFits({9: fits, 10: fits}).json()))
    return path


def test_a_time_of_day_is_one() -> None:
    for text in ("24:00", "9", "9:60", "noon"):
        with pytest.raises(SystemExit):
            main(["trace", "fit", "a.jsonl", "out.json", "--begins", text])
