"""The state file: whole or absent, and retried when the disk refuses."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pinyon.core.errors import Unavailable
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, Member, RegionView
from services.controller import state_file
from services.controller.state_file import StateFile, read_state


def federation(version: int) -> Federation:
    member = Member(LbInfo("a-0", "2", "a", "h:1"), LbState.FAILED, False, ("1",))
    cluster = Cluster("a", "a", "", ("http://x",), ("http://y",), (), ("a-0",), "b-0")
    return Federation("e", version, (RegionView("a", ("eu",)),), (member,), (cluster,))


async def test_what_is_kept_is_read_again(tmp_path: Path):
    path = tmp_path / "state.json"
    file = StateFile(path)
    file.start()
    file.keep(federation(3))
    await file.wait(3)
    assert read_state(path) == federation(3)
    file.keep(federation(4))
    await file.close()
    assert read_state(path) == federation(4), "the last one at the end, too"
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


async def test_an_older_version_never_follows_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "state.json"
    begun, go = threading.Event(), threading.Event()
    write = state_file._write

    def slow_first(path: Path, kept: Federation) -> None:
        if kept.version == 3:
            begun.set()
            assert go.wait(60)
        write(path, kept)

    monkeypatch.setattr(state_file, "_write", slow_first)
    file = StateFile(path)
    file.start()
    file.keep(federation(3))
    await asyncio.to_thread(begun.wait, 60)
    file.keep(federation(4))
    closing = asyncio.create_task(file.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    assert read_state(path) == federation(4)


async def test_a_disk_that_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "state.json"
    outcomes: list[bool] = []
    pauses: asyncio.Queue[float] = asyncio.Queue()
    go = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.put_nowait(seconds)
        await go.wait()

    file = StateFile(path, outcomes.append, sleep)
    file.start()
    folder.rmdir()
    file.keep(federation(3))
    assert await asyncio.wait_for(pauses.get(), 60) == 0.5
    monkeypatch.setattr(state_file, "WRITE_S", 0.01)
    with pytest.raises(Unavailable, match="could not be written"):
        await file.wait(3)
    monkeypatch.undo()
    folder.mkdir()
    go.set()
    await file.wait(3)
    assert outcomes == [False, True]
    await file.close()
    assert read_state(path) == federation(3)


async def test_a_version_that_cannot_be_written_ends_nothing(tmp_path: Path):
    path = tmp_path / "state.json"
    outcomes: asyncio.Queue[bool] = asyncio.Queue()
    go = asyncio.Event()

    async def sleep(_: float) -> None:
        await go.wait()

    file = StateFile(path, outcomes.put_nowait, sleep)
    file.start()
    file.keep(federation(2**64))  # this number fits into no message
    assert not await asyncio.wait_for(outcomes.get(), 60)
    file.keep(federation(3))
    go.set()
    await file.wait(3)
    await file.close()
    assert read_state(path) == federation(3)


async def test_without_a_file_all_counts_as_written():
    file = StateFile(None)
    file.start()
    file.keep(federation(3))
    await file.wait(99)
    await file.close()
