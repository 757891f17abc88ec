"""Trace files: their formats, their errors, and the public files against known values."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon_lab.traces import TraceFile, TraceRow

SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces"

MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}
QWEN = {
    "chat_id": 3,
    "parent_chat_id": 1,
    "timestamp": 2.5,
    "input_length": 20,
    "output_length": 5,
    "type": "text",
    "turn": 2,
    "hash_ids": [1, 2],
}
BAILIAN = {
    "timestamp": "2025-02-10 17:41:33.945",
    "chat_id": "aa",
    "parent_chat_id": "",
    "user_id": "100",
    "req_type": "text",
    "num_input_tokens": 9,
    "num_output_tokens": 4,
    "tokens_hashes_input": [11, 12, 13],
    "tokens_hashes_output": [14],
}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


def write(folder: Path, *rows: object, zipped: bool = False) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path = folder / ("trace.gz" if zipped else "trace")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = TraceFile(write(tmp_path, MOONCAKE, zipped=True))
    assert (trace.format.name, trace.format.block_tokens) == ("mooncake", 512)
    assert list(trace.rows()) == [TraceRow(1.5, 600, 7, (4, 9))]
    assert next(trace.rows()).category == ""


def test_sessions_of_mooncakes_format_have_turns(tmp_path: Path) -> None:
    rows = [MOONCAKE | {"session_id": session} for session in (5, 6, 5)]
    assert [row.category for row in TraceFile(write(tmp_path, *rows)).rows()] == ["session/1", "session/1", "session/2"]


def test_mooncakes_format_may_have_types_turns_and_users(tmp_path: Path) -> None:
    """The rows are as pinyon writes them. The turns of a session are counted instead."""
    rows = [
        MOONCAKE | {"type": "tool", "turn": 2, "user_id": "u"},
        MOONCAKE | {"user_id": 7},
        MOONCAKE | {"session_id": "s", "type": "tool", "turn": 5, "user_id": "u"},
    ]
    trace = TraceFile(write(tmp_path, *rows))
    first, second, third = trace.rows()
    assert first == TraceRow(1.5, 600, 7, (4, 9), "tool", 2, user="u")
    assert first.category == "tool/2"
    assert second == TraceRow(1.5, 600, 7, (4, 9), user="7")
    assert third == TraceRow(1.5, 600, 7, (4, 9), "session", 1, "s", user="u")


def test_qwen(tmp_path: Path) -> None:
    root = QWEN | {"chat_id": 1, "parent_chat_id": -1, "turn": 1, "user_id": "u"}
    trace = TraceFile(write(tmp_path, root, QWEN))
    assert trace.format.block_tokens == 16
    first, second = trace.rows()
    assert first == TraceRow(2.5, 20, 5, (1, 2), "text", 1, "1", "", "u")
    assert second == TraceRow(2.5, 20, 5, (1, 2), "text", 2, "3", "1")
    assert second.category == "text/2"


def test_the_papers_record(tmp_path: Path) -> None:
    """The turns are those of the chain of parents."""
    second = BAILIAN | {"chat_id": "bb", "parent_chat_id": "aa", "timestamp": "2025-02-10 17:41:34"}
    trace = TraceFile(write(tmp_path, BAILIAN, second, BAILIAN | {"chat_id": "cc", "parent_chat_id": "bb"}))
    assert trace.format.block_tokens == 4
    rows = list(trace.rows())
    assert [row.turn for row in rows] == [1, 2, 3]
    assert rows[1].time_s - rows[0].time_s == pytest.approx(0.055, abs=1e-6)
    assert rows[0]._replace(blocks=(), output_blocks=())[1:] == (9, 4, (), "text", 1, "aa", "", "100", ())
    assert (len(rows[0].blocks), len(rows[0].output_blocks)) == (3, 1)


def test_the_papers_hashes_become_ids_of_all_up_to_there(tmp_path: Path) -> None:
    """The ids are equal where the whole prefix is equal, also in the prompt after an answer."""
    prompts = [([1, 2, 3], [4]), ([1, 2], [3, 4]), ([3, 1, 2], []), ([1, 2, 3, 4], [1]), ([0, 1], []), ([], [1, 2])]
    rows = TraceFile(
        write(tmp_path, *(BAILIAN | {"tokens_hashes_input": one, "tokens_hashes_output": two} for one, two in prompts))
    ).rows()
    ids: dict[tuple[int, ...], int] = {}
    for (prompt, answer), row in zip(prompts, rows, strict=True):
        assert (len(row.blocks), len(row.output_blocks)) == (len(prompt), len(answer))
        for end, found in enumerate((*row.blocks, *row.output_blocks), 1):
            assert ids.setdefault((*prompt, *answer)[:end], found) == found
    assert len(set(ids.values())) == len(ids)
    assert all(0 <= found < 1 << 63 for found in ids.values())


def test_the_papers_record_may_say_minus_one(tmp_path: Path) -> None:
    rows = TraceFile(write(tmp_path, *(BAILIAN | {"chat_id": chat, "parent_chat_id": -1} for chat in "ab"))).rows()
    assert [(row.turn, row.parent) for row in rows] == [(1, ""), (1, "")]


def test_azure_has_lengths_only(tmp_path: Path) -> None:
    trace = TraceFile(write(tmp_path, AZURE.rstrip()))
    assert trace.format.block_tokens == 0
    first, second = trace.rows()
    assert first[1:4] == (374, 44, ())
    assert second.time_s - first.time_s == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "no JSON object"),
        (MOONCAKE | {"timestamp": "x"}, "timestamp is no number"),
        (MOONCAKE | {"timestamp": float("nan")}, "timestamp is out of range"),
        (MOONCAKE | {"input_length": -1}, "input_length is no count"),
        (MOONCAKE | {"input_length": True}, "input_length is no count"),
        (MOONCAKE | {"input_length": 1 << 36}, "input_length is no count"),
        (MOONCAKE | {"hash_ids": [1, "2"]}, "hash_ids is no list of ids"),
        (MOONCAKE | {"hash_ids": [-1]}, "hash_ids is no list of ids"),
        (MOONCAKE | {"hash_ids": [1 << 63]}, "hash_ids is no list of ids"),
        ({"timestamp": 1}, "input_length is no count"),
        (MOONCAKE | {"session_id": "x" * 129}, "session_id has more than"),
        (MOONCAKE | {"user_id": 1.5}, "user_id is neither a text nor an integer"),
        (MOONCAKE | {"type": ["tool"]}, "type is neither a text nor an integer"),
        (MOONCAKE | {"type": "tool", "turn": -1}, "turn is no count"),
        (MOONCAKE | {"turn": None}, "turn is no count"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_row_is_counted_and_named(tmp_path: Path, broken: object, reason: str) -> None:
    trace = TraceFile(write(tmp_path, MOONCAKE, broken, "", MOONCAKE))
    assert len(list(trace.rows())) == 2
    assert trace.broken == 1
    assert trace.reasons[0].startswith("line 2: ")
    assert reason in trace.reasons[0]
    assert len(list(trace.rows())) == 2
    assert trace.broken == 1, "counted anew with each reading"


def test_a_file_that_ends_too_early_gives_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path, *[MOONCAKE | {"timestamp": number} for number in range(5000)], zipped=True)
    path.write_bytes(path.read_bytes()[:-3000])
    trace = TraceFile(path)
    rows = list(trace.rows())
    assert 0 < len(rows) < 5000
    assert trace.broken == 1
    assert "damaged after" in trace.reasons[0]


def test_rows_in_order_of_time(tmp_path: Path) -> None:
    times = [3, 1, 2, 1]
    trace = TraceFile(write(tmp_path, *[MOONCAKE | {"timestamp": at, "hash_ids": [n]} for n, at in enumerate(times)]))
    assert [row.blocks for row in trace.sorted_rows()] == [(1,), (3,), (2,), (0,)]
    assert [row.blocks for row in trace.sorted_rows(2)] == [(1,), (0,)]


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        TraceFile(tmp_path / "nothing")
    for text in ("", "hello", '{"a": 1}'):
        with pytest.raises(InvalidArgument):
            TraceFile(write(tmp_path, text))
    with pytest.raises(InvalidArgument, match="mooncake, qwen"):
        TraceFile(write(tmp_path, MOONCAKE), "nonsense")
    assert TraceFile(write(tmp_path, '{"a": 1}', MOONCAKE), "mooncake").broken == 0


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "rows", "mean_in", "mean_out"),
    [
        ("mooncake_conversation.jsonl.gz", 12_031, 12_035.1, 342.6),
        ("mooncake_synthetic.jsonl.gz", 3_993, 15_325.5, 149.1),
        ("claude_code_a.jsonl.gz", 5_012, 114_256.3, 452.3),
        ("azure_2023_code.csv.gz", 8_819, 2_047.8, 27.9),
        ("azure_2023_conv.csv.gz", 19_366, 1_154.7, 211.1),
        ("mooncake_toolagent_head.jsonl", 45, None, None),
        ("qwen_traceA_head.jsonl", 7, None, None),
    ],
)
def test_public_traces(name: str, rows: int, mean_in: float | None, mean_out: float | None) -> None:
    trace = TraceFile(SHARED / name)
    read = list(trace.rows())
    assert (len(read), trace.broken) == (rows, 0)
    if mean_in is not None:
        assert sum(row.input_tokens for row in read) / rows == pytest.approx(mean_in, abs=0.05)
        assert sum(row.output_tokens for row in read) / rows == pytest.approx(mean_out, abs=0.05)
    size = trace.format.block_tokens
    if size:
        assert all(len(row.blocks) == -(-row.input_tokens // size) for row in read)


@pytest.mark.parametrize(
    "row", [f"2023-11-16 18:15:46,{'9' * 30},1", "2023-11-16 18:15:46.1e400,1,1", "2023-11-16 18:15:46,-5,1"]
)
def test_azure_rows_have_times_and_counts(tmp_path: Path, row: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n{row}\n")
    trace = TraceFile(path)
    assert len(list(trace.rows())) == 1
    assert trace.broken == 1


def test_a_file_that_is_damaged_from_its_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"timestamp": 1}\n')[:12])
    with pytest.raises(InvalidArgument, match="is damaged"):
        TraceFile(path)
