"""Shared parts of the tests of the laboratory's commands: traces as files, and the result of a command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pinyon.cli import main


def write(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> str:
    """Writes rows, or whole lines, as a trace."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def mooncake(*blocks: list[int], every_ms: float = 10) -> list[dict[str, Any]]:
    """Returns the rows of requests with these full blocks."""
    return [
        {"timestamp": every_ms * number, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(blocks)
    ]


def qwen(rows: int = 60) -> list[dict[str, Any]]:
    """Returns the rows of 20 sessions of three turns, by 10 users."""
    return [
        {"chat_id": at, "parent_chat_id": at - 20 if at >= 20 else -1, "timestamp": 10 * at}
        | {"input_length": 16 * (at // 20 + 1), "output_length": 3, "type": "text", "turn": at // 20 + 1}
        | {"hash_ids": [100 * (at % 20) + part for part in range(at // 20 + 1)]}
        | {"user_id": f"u{at % 10}", "unknown": "stays"}
        for at in range(rows)
    ]


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Returns the JSON object that a command printed last."""
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def result_of(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    """Runs a command that succeeds, and returns the JSON object that it prints last."""
    assert main(arguments) == 0
    return said(capsys)
