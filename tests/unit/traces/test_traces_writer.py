"""Written traces are read back unchanged; an unfinished file is no trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces import TraceFile, TraceRow, TraceWriter
from pinyon_lab.traces.formats import line_of

ROWS = [
    TraceRow(0.0, 33, 5, (1, 2, 3), "text", 1, "7", "", "u1", (4,)),
    TraceRow(0.125, 60, 1, (1, 2, 3, 5), "text", 2, "8", "7", "u1"),
    TraceRow(9.5, 0, 0, (), "", 0, "9", ""),
]


@pytest.fixture(params=["a.jsonl", "a.jsonl.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def written(path: Path, *form: str) -> TraceFile:
    with TraceWriter(path, *form) as writer:
        for row in ROWS:
            writer.write(row)
    return TraceFile(path)


def test_round_trip(path: Path) -> None:
    trace = written(path)
    assert (trace.format.name, list(trace.rows()), trace.broken) == ("qwen", ROWS, 0)
    first = path.read_bytes()
    written(path)
    assert path.read_bytes() == first, "the same rows, another file"


def test_nothing_is_left_of_a_file_that_was_not_finished(path: Path) -> None:
    path.write_text("an old one")

    def broken_off() -> None:
        with TraceWriter(path) as writer:
            writer.write(ROWS[0])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        broken_off()
    assert path.read_text() == "an old one"
    assert list(path.parent.iterdir()) == [path]


def test_there_is_no_negative_zero() -> None:
    assert '"timestamp":0.0,' in line_of(ROWS[0]._replace(time_s=-1e-9))


def test_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with TraceWriter(Path("-")) as writer:
        writer.write(ROWS[0])
    assert capfdbinary.readouterr().out.startswith(b'{"chat_id":"7","parent_chat_id":-1,')


def test_mooncakes_form_has_no_ids_of_requests(path: Path) -> None:
    """The format has whole milliseconds, and type, turn and user where there are any."""
    trace = written(path, "mooncake")
    assert (trace.format.name, trace.broken) == ("mooncake", 0)
    assert list(trace.rows()) == [row._replace(chat="", parent="", output_blocks=()) for row in ROWS]
    assert line_of(ROWS[1], "mooncake") == (
        '{"timestamp":125,"input_length":60,"output_length":1,"hash_ids":[1,2,3,5],"type":"text","turn":2,"user_id":"u1"}\n'
    )
    assert line_of(ROWS[2], "mooncake") == '{"timestamp":9500,"input_length":0,"output_length":0,"hash_ids":[]}\n'


def test_only_these_two_forms_are_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="writes qwen and mooncake, not azure"),
        TraceWriter(tmp_path / "a", "azure") as writer,
    ):
        writer.write(ROWS[0])
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """The error comes before any file is made: a folder, device or pipe of that name would else be replaced."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(".")):
        with pytest.raises(InvalidArgument, match="it is there and no file"), TraceWriter(path):
            pass
    with pytest.raises(InvalidArgument, match="No such file or directory"), TraceWriter(tmp_path / "none" / "a"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_file_that_cannot_be_finished_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with (
        pytest.raises(InvalidArgument, match=r"cannot write .*a\.jsonl: No space left"),
        TraceWriter(tmp_path / "a.jsonl") as writer,
    ):
        writer.write(ROWS[0])
    assert list(tmp_path.iterdir()) == []
