"""A journal's file is bounded, and never delays what it records."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, replay
from pinyon.runtime.journal_file import BUFFER_BYTES, EARLIER_MAX, WAITING_BYTES, JournalFile


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


def test_what_is_written_replays(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(str(path), 1 << 20, (), {"service": "test"})
    counter = file.record("counter", Counter(), ("add",))
    for number in range(100):
        counter.add(number)
    file.close()
    file.close()
    with path.open() as lines:
        seen = replay(lines, lambda header: {"counter": Counter()}, Codec(()), {"counter": ("add",)})
    assert (seen.calls, seen.different) == (100, 0)


def within(seconds: float, said: Callable[[], bool]) -> bool:
    """Returns whether the condition becomes true in time; a file sends its reader no event."""
    deadline = time.monotonic() + seconds
    while not (true := said()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


def test_a_journal_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(str(path), 1 << 20, (), {"service": "test"})
    counter = file.record("counter", Counter(), ("add",))
    try:
        counter.add(1)
        assert within(30, lambda: path.read_bytes().count(b"\n") == 2), path.read_text()
        counter.add(2)
        assert within(30, lambda: path.read_bytes().count(b"\n") == 3), path.read_text()
        with path.open() as lines:
            seen = replay(lines, lambda header: {"counter": Counter()}, Codec(()), {"counter": ("add",)})
        assert (seen.calls, seen.different) == (2, 0)
    finally:
        file.close()


def test_a_full_buffer_is_written_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(str(path), 1 << 30, (), {})
    counter = file.record("counter", Counter(), ("add",))
    try:
        size = 0
        while size < 3 * BUFFER_BYTES:
            counter.add(1)
            if (grown := path.stat().st_size) != size:
                size = grown
                assert within(30, lambda: path.read_bytes().endswith(b"\n"))
    finally:
        file.close()


def test_a_full_journal_ends_with_a_whole_line_and_calls_go_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(str(path), 2000, (), {})
    counter = file.record("counter", Counter(), ("add",))
    for _ in range(1000):
        counter.add(1)
    assert counter.total == 1000
    file.close()
    assert path.stat().st_size <= 2000
    with path.open() as lines:
        seen = replay(lines, lambda header: {"counter": Counter()}, Codec(()), {"counter": ("add",)})
    assert 10 < seen.calls < 100
    assert seen.different == 0


def test_a_full_disk_ends_the_journal_and_nothing_else() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    file = JournalFile("/dev/full", 1 << 30, (), {})
    counter = file.record("counter", Counter(), ("add",))
    for _ in range(10_000):
        counter.add(1)
    assert counter.total == 10_000
    file.close()


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot write") as error:
        JournalFile(str(tmp_path / "nowhere" / "journal.jsonl"), 1, (), {})
    assert error.value.field == "journal"


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("old")
    path.chmod(0o644)
    file = JournalFile(str(path), 1 << 20, (), {})
    with pytest.raises(InvalidArgument, match="another process"):
        JournalFile(str(path), 1 << 20, (), {})
    file.close()
    assert path.read_text().startswith("{")
    assert path.stat().st_mode & 0o077 == 0
    assert [each.name for each in tmp_path.iterdir() if each != path] == ["journal.1.jsonl"], "only a start moves it"
    JournalFile(str(path), 1 << 20, (), {}).close()


def calls_of(path: Path) -> int:
    with path.open() as lines:
        seen = replay(lines, lambda header: {"counter": Counter()}, Codec(()), {"counter": ("add",)})
    assert seen.different == 0
    return seen.calls


def write_calls(path: Path, calls: int) -> None:
    """Writes one start of a service that makes this many decisions."""
    file = JournalFile(str(path), 1 << 20, (), {"service": "test"})
    counter = file.record("counter", Counter(), ("add",))
    for _ in range(calls):
        counter.add(1)
    file.close()


def test_a_start_keeps_the_journal_of_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.jsonl"
    path.touch()  # an empty file is not kept
    for calls in (1, 2, 3):
        write_calls(path, calls)
    names = ("decode-0.jsonl", "decode-0.1.jsonl", "decode-0.2.jsonl")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names)
    assert [calls_of(tmp_path / name) for name in names] == [3, 2, 1]
    assert all(each.stat().st_mode & 0o077 == 0 for each in tmp_path.iterdir())


def test_a_bounded_number_of_earlier_journals_is_kept(tmp_path: Path) -> None:
    for calls in range(1, EARLIER_MAX + 4):
        write_calls(tmp_path / "j", calls)
    assert {each.name for each in tmp_path.iterdir()} == {"j", *(f"j.{n}" for n in range(1, EARLIER_MAX + 1))}
    assert calls_of(tmp_path / "j") == EARLIER_MAX + 3
    assert calls_of(tmp_path / f"j.{EARLIER_MAX}") == 3


def test_a_pipe_can_take_a_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_calls(tmp_path / "pipe", 1)
        assert os.read(reader, 1 << 16).count(b"\n") == 2
    finally:
        os.close(reader)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def writers() -> int:
    return sum(thread.name == "pinyon-journal" for thread in threading.enumerate())


def is_open(path: Path) -> bool:
    """Returns whether this process has the file open; a descriptor that closes meanwhile does not count."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if descriptor.readlink() == path:
                return True
    return False


def test_a_disk_that_hangs_holds_up_nobody_and_ends_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a reader that reads nothing makes the writer wait
    file = JournalFile(str(path), 1 << 30, (), {"text": "x" * (1 << 20)})
    try:
        counter = file.record("counter", Counter(), ("add",))
        calls = 0
        while not file.ended and calls < WAITING_BYTES:
            counter.add(1)
            calls += 1
        assert file.ended == "the disk is too slow"
        assert counter.total == calls
    finally:
        os.close(reader)
        file.close()


def test_a_journal_that_nobody_closed_is_written_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    before = writers()
    file = JournalFile(str(path), 1 << 20, (), {})
    file.record("counter", Counter(), ("add",)).add(1)
    assert is_open(path)
    del file
    gc.collect()
    assert within(30, lambda: writers() == before)
    assert path.read_bytes().count(b"\n") == 2
    assert not is_open(path)
