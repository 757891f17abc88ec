"""Watched files are read once per change, and a bad file leaves the old content in use."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.watch import FileWatch


class Words:
    """The content of a file, as a service would keep it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: list[str] = []
        self.loads = 0

    def load(self) -> str:
        self.loads += 1
        text = self.path.read_text()
        if text == "bad":
            raise InvalidArgument("no such word")
        return text


@pytest.fixture
def words(tmp_path: Path) -> Words:
    path = tmp_path / "words"
    path.write_text("first")
    return Words(path)


def replace(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


async def test_a_changed_file_is_read_once(words: Words) -> None:
    watch = FileWatch()
    watch.add("words", [words.path], words.load, words.taken.append)
    await watch.look()
    assert words.loads == 0, "what it was when it was added is known"
    replace(words.path, "other")
    await watch.look()
    await watch.look()
    assert (words.taken, words.loads) == (["other"], 1)


async def test_a_bad_file_is_told_once_and_changes_nothing(words: Words, caplog: pytest.LogCaptureFixture) -> None:
    watch = FileWatch()
    watch.add("words", [words.path], words.load, words.taken.append)
    replace(words.path, "bad")
    with caplog.at_level(logging.WARNING):
        await watch.look()
        await watch.look()
    assert [record.getMessage() for record in caplog.records] == [
        "the new words cannot be used, the old one stays: no such word"
    ]
    words.path.unlink()
    await watch.look()
    replace(words.path, "good")
    await watch.look()
    assert words.taken == ["good"]


async def test_what_could_not_be_used_for_a_moment_is_tried_again(
    words: Words, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate that came while no descriptor was free would else be used at the next renewal, after its end."""
    failures = [OSError("too many open files")] * 2

    def load() -> str:
        if failures:
            raise failures.pop()
        return words.load()

    watch = FileWatch()
    watch.add("words", [words.path], load, words.taken.append)
    replace(words.path, "other")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            await watch.look()
    assert (words.taken, words.loads) == (["other"], 1)
    assert len(caplog.records) == 1


async def test_one_files_failure_is_not_anothers(words: Words, tmp_path: Path) -> None:
    other = Words(tmp_path / "other")
    other.path.write_text("x")
    watch = FileWatch()

    def fails() -> str:
        raise RuntimeError("a defect")

    watch.add("defect", [words.path], fails, words.taken.append)
    watch.add("other", [other.path], other.load, other.taken.append)
    replace(words.path, "y")
    replace(other.path, "z")
    await watch.look()
    assert (words.taken, other.taken) == ([], ["z"])


async def test_it_looks_by_itself_until_it_is_closed(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    seen = asyncio.Event()
    monkeypatch.setattr("pinyon.runtime.watch.PERIOD_S", 0.001)
    watch = FileWatch()
    watch.add("words", [words.path], words.load, lambda _: seen.set())
    watch.start()
    replace(words.path, "other")
    async with asyncio.timeout(60):
        await seen.wait()
    await watch.close()
    await watch.close()
