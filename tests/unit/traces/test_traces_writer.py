"""What is written is what is read; a file that was not finished is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pinyon.traces import TraceFile, TraceRow, TraceWriter

ROWS = [
    TraceRow(0.0, 33, 5, (1, 2, 3), "text", 1, "7", "", "u1", (4,)),
    TraceRow(0.125, 60, 1, (1, 2, 3, 5), "text", 2, "8", "7", "u1"),
    TraceRow(9.5, 0, 0, (), "", 0, "9", ""),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with TraceWriter(path) as writer:
        for row in ROWS:
            writer.write(row)
    trace = TraceFile(path)
    assert (trace.format.name, list(trace.rows()), trace.broken) == ("qwen", ROWS, 0)
    first = path.read_bytes()
    with TraceWriter(path) as writer:
        for row in ROWS:
            writer.write(row)
    assert path.read_bytes() == first, "the same rows, another file"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("an old one")

    def broken_off() -> None:
        with TraceWriter(path) as writer:
            writer.write(ROWS[0])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        broken_off()
    assert path.read_text() == "an old one"
    assert list(tmp_path.iterdir()) == [path]


def test_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with TraceWriter(Path("-")) as writer:
        writer.write(ROWS[0])
    assert capfdbinary.readouterr().out.startswith(b'{"chat_id":"7","parent_chat_id":-1,')
