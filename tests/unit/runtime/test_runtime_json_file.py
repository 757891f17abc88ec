"""JSON files that settings name: errors in a file are reported for the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.settings import FILE_BYTES_MAX, read_json


def parse(document: Any) -> int:
    if not isinstance(document, list):
        raise InvalidArgument("must be a list")
    return len(document)


def test_what_it_says_and_without_a_path_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[1, 2]")
    assert read_json(str(path), "geography_file", parse, 0) == 2
    assert read_json("", "geography_file", parse, 0) == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "must be a list"),
        (b"[", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b" " * (FILE_BYTES_MAX + 1), "larger than 4194304 bytes"),
        (None, "cannot read"),
    ],
    ids=["refused", "no JSON", "no text", "deep", "large", "no file"],
)
def test_what_cannot_be_used_names_the_file_and_the_setting(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=said) as caught:
        read_json(str(path), "geography_file", parse, 0)
    assert str(path) in caught.value.message
    assert caught.value.field == "geography_file"
