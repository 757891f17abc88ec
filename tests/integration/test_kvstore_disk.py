"""The disk tier of real nodes: it serves what memory cannot hold, survives kills, and never fails a request."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from launch.process import ServiceProcess
from pinyon.core.errors import FailedPrecondition, InvalidArgument
from pinyon.store.checksums import checksums_of
from pinyon.store.disk_log import DiskObject
from pinyon.store.kv_memory import Piece
from pinyon.store.records import Tier
from pinyon.store.writer import PutOutcome
from services.kvstore.disk_file import FILE, DiskFile
from services.kvstore.settings import KvStoreSettings
from tests.integration.kvstore_parts import OBJECT, Client, Node, client_of, key, running_node, start
from tests.waiting import WAIT_S, eventually

DISK_MIB = 64
POOL_OBJECTS = (1 << 20) // OBJECT
"""The objects that fit into the memory of a node here."""
MANY = range(4 * POOL_OBJECTS)


def saved(node: Node) -> bool:
    return node.figure("disk_unsaved_objects") == 0 and node.figure("disk_objects") >= node.figure("objects")


async def put_all(node: Node, client: Client, numbers: Sequence[int]) -> None:
    """Puts objects one by one, each after the one before is on the disk."""
    for number in numbers:
        await client.stored([number])
        await eventually(lambda: saved(node), "the disk has all of it")


async def test_objects_that_left_memory_are_read_from_the_disk(redis_url: str, tmp_path: Path) -> None:
    async with (
        running_node(redis_url, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node,
        client_of(redis_url, slots=len(MANY)) as client,
    ):
        await put_all(node, client, MANY)
        assert node.figure("objects") < len(MANY) / 2
        assert node.figure("disk_lost_objects_total") == 0
        await client.until_listed(MANY)
        located = await client.store.metadata.locate([key(number) for number in MANY])
        assert {each.tier for (each,) in located} == {Tier.MEMORY, Tier.DISK}
        for number in (0, 30, 5, len(MANY) - 1):
            assert await client.get([number]) == [True]
        half = POOL_OBJECTS // 2
        assert await client.get(range(half)) == [True] * half, "a run of blocks"
        assert node.figure("disk_promoted_objects_total") >= half
        assert node.figure("put_objects_total") == len(MANY), "what is read from the disk is no put"
        assert node.figure("hit_blocks_total") == 4 + half
        assert await client.put([0, 1, 20]) == (PutOutcome.EXISTS,) * 3
        await client.until_listed(MANY)
        await eventually(node.nothing_is_left, "leases and puts are over")
        written = node.figure("disk_written_bytes_total") / node.figure("disk_saved_bytes_total")
        print(f"write amplification of single objects of 64 KiB: {written:.3f}")
        assert written < 1.1


async def test_room_is_made_ahead_of_puts(redis_url: str, tmp_path: Path) -> None:
    async with (
        running_node(redis_url, pool_mib=4, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node,
        client_of(redis_url) as client,
    ):
        for number in range(2 * 4 * POOL_OBJECTS):
            await client.stored([number])
            await eventually(lambda: saved(node), "the disk has all of it")
            table = node.node.table
            assert table.capacity_bytes - table.used_bytes >= OBJECT, "the next put finds room at once"
        assert node.figure("objects") > 3 * POOL_OBJECTS


async def test_puts_faster_than_the_disk_are_served_all_the_same(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = DiskFile.write
    monkeypatch.setattr(DiskFile, "write", lambda *given: (go_on.wait(), write(*given))[1])
    async with (
        running_node(redis_url, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node,
        client_of(redis_url) as client,
    ):
        try:
            for number in MANY:
                await client.stored([number])
            assert node.figure("disk_lost_objects_total")
            assert node.figure("disk_objects") == 0
            assert await client.fetch(node.address, MANY[-4:]) == 4
            assert node.figure("disk_unsaved_objects") <= 2 * POOL_OBJECTS + 256
        finally:
            go_on.set()
        await eventually(lambda: saved(node), "the disk has what is left")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restarted_node_serves_what_was_on_its_disk(
    redis_url: str, start_node: Callable[..., ServiceProcess], tmp_path: Path, how: signal.Signals
) -> None:
    disk = ["--disk-dir", str(tmp_path / "disk"), "--disk-mib", str(DISK_MIB), "--drain-s", "30"]
    first = await asyncio.to_thread(start_node, *disk)
    numbers = range(40)
    async with client_of(redis_url) as client:
        for at in range(0, 40, 8):
            await client.stored(numbers[at : at + 8])
        if how == signal.SIGKILL:
            page = f"http://{first.endpoints['metrics']}/metrics"

            async def all_saved() -> bool:
                answer = await asyncio.to_thread(urllib.request.urlopen, page, timeout=WAIT_S)
                return b"\npinyon_kvstore_disk_objects 40.0\n" in answer.read()

            await eventually(all_saved, "all is on the disk")
        first.signal(how)
        assert await asyncio.to_thread(first.wait, WAIT_S)
        client.forget_nodes()
        await asyncio.to_thread(start_node, *disk)
        client.forget_nodes()
        await client.until_listed(numbers)
        assert await client.get(numbers) == [True] * 40


async def test_a_flipped_bit_on_the_disk_is_a_miss(redis_url: str, tmp_path: Path) -> None:
    settings = {"disk_dir": str(tmp_path), "disk_mib": DISK_MIB}
    async with running_node(redis_url, **settings) as node, client_of(redis_url) as client:
        await put_all(node, client, MANY)
        with (tmp_path / FILE).open("r+b") as file:
            file.seek(node.node.table.disk.find(key(1)).offset + 100)
            file.write(b"other bytes")
        assert await client.fetch(node.address, [0, 1, 2]) == 1
        assert await client.fetch(node.address, [2]) == 1
        await client.until_listed([1], replicas=0)
        assert node.figure("disk_failures_total") == 1
        await client.stored([1])
        assert await client.fetch(node.address, [0, 1, 2]) == 3


async def test_a_restart_drops_what_was_torn(redis_url: str, tmp_path: Path) -> None:
    settings = {"disk_dir": str(tmp_path), "disk_mib": DISK_MIB}
    async with running_node(redis_url, **settings) as node, client_of(redis_url) as client:
        await put_all(node, client, [1, 2])
        offset = node.node.table.disk.find(key(2)).offset
    os.truncate(tmp_path / FILE, offset + OBJECT // 2)
    async with running_node(redis_url, **settings) as node, client_of(redis_url) as client:
        await client.until_listed([1])
        assert await client.fetch(node.address, [1, 2]) == 1
        await client.stored([2])
        assert await client.fetch(node.address, [1, 2]) == 2


async def test_a_removed_object_does_not_come_back(redis_url: str, tmp_path: Path) -> None:
    settings = {"disk_dir": str(tmp_path), "disk_mib": DISK_MIB}
    async with running_node(redis_url, **settings) as node, client_of(redis_url) as client:
        await put_all(node, client, [1, 2, 3])
        assert await client.remove([2]) == 1
        await client.until_listed([2], replicas=0)
    async with running_node(redis_url, **settings) as node, client_of(redis_url) as client:
        await client.until_listed([1, 3])
        assert await client.listed([2]) == [0]
        assert node.figure("disk_objects") == 2


async def test_a_node_starts_without_a_disk_that_fails(redis_url: str, tmp_path: Path, monkeypatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", failing)
        async with running_node(redis_url, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node:
            assert node.node.tier is None
            async with client_of(redis_url) as client:
                await client.stored([1])
                assert await client.fetch(node.address, [1]) == 1
    async with running_node(redis_url, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node:
        assert node.node.tier is not None, "the file was let go"


async def test_a_full_disk_is_a_smaller_cache(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 24 << 20
    write = os.pwritev

    def full(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset + sum(map(len, buffers)) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    async with (
        running_node(redis_url, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node,
        client_of(redis_url) as client,
    ):
        for number in range(600):  # 37 MiB
            await client.stored([number])
            if number % 8 == 7:
                await eventually(lambda: node.figure("disk_unsaved_objects") == 0, "the disk is done")
        assert node.figure("disk_failures_total")
        assert node.figure("disk_capacity_bytes") <= limit
        assert node.figure("disk_objects") > 100
        assert await client.fetch(node.address, [599, 598]) == 2
        older = [number for number in range(600) if key(number) in node.node.table.disk]
        assert await client.fetch(node.address, older[:8]) == 8
        assert await client.fetch(node.address, older[:40]) >= 8, "as many as fit into half of the memory"


async def test_a_disk_that_fails_or_hangs_is_a_miss(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_node(redis_url, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node,
        client_of(redis_url) as client,
    ):
        await put_all(node, client, MANY)
        read, go_on = DiskFile.read_objects, threading.Event()
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        assert await client.fetch(node.address, [0]) == 0
        assert node.figure("disk_failures_total") == 1
        await client.until_listed([0], replicas=0)
        monkeypatch.undo()
        monkeypatch.setattr(DiskFile, "read_objects", lambda *given: (go_on.wait(), read(*given))[1])
        try:
            assert await client.fetch(node.address, [1]) == 0, "the reader does not wait longer than a second"
            assert await client.fetch(node.address, [len(MANY) - 1]) == 1, "memory is as fast as ever"
            await client.stored([1000])
        finally:
            go_on.set()
        await eventually(node.nothing_is_left, "the late read has ended")
        assert await client.fetch(node.address, [1]) == 1


async def test_a_folder_has_one_owner(redis_url: str, tmp_path: Path) -> None:
    settings = {"disk_dir": str(tmp_path), "disk_mib": DISK_MIB}
    async with running_node(redis_url, **settings):
        with pytest.raises(FailedPrecondition, match="another process"):
            async with running_node(redis_url, "kv-1", **settings):
                pass


async def test_bad_folders_are_named(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument) as caught:
        async with running_node(redis_url, disk_dir=str(tmp_path / "file"), disk_mib=DISK_MIB):
            pass
    assert caught.value.field == "disk_dir"
    with pytest.raises(ValueError, match="greater than or equal to 16"):
        KvStoreSettings(disk_mib=15)


@pytest.mark.parametrize("change", ["size", "garbage"])
async def test_a_file_of_another_layout_is_begun_anew(redis_url: str, tmp_path: Path, change: str) -> None:
    first = {"disk_dir": str(tmp_path), "disk_mib": DISK_MIB}
    async with running_node(redis_url, **first) as node, client_of(redis_url) as client:
        await put_all(node, client, [1, 2])
    if change == "garbage":
        with (tmp_path / FILE).open("r+b") as file:
            file.write(os.urandom(4096))
    then = first if change == "garbage" else {**first, "disk_mib": 2 * DISK_MIB}
    async with running_node(redis_url, **then) as node, client_of(redis_url) as client:
        assert node.figure("disk_objects") == 0
        await put_all(node, client, [1, 2])
        assert await client.fetch(node.address, [1, 2]) == 2


async def test_a_put_of_a_block_on_the_disk_is_told_that_it_exists(redis_url: str, tmp_path: Path) -> None:
    async with (
        running_node(redis_url, disk_dir=str(tmp_path), disk_mib=DISK_MIB) as node,
        client_of(redis_url) as client,
    ):
        await put_all(node, client, MANY)
        assert not node.node.table.in_memory(key(0))
        put = await start(node, 0)
        assert put.put_id == 0
        assert [slot.state for slot in put.slots] == [2]


def test_a_crash_while_a_region_is_reused_keeps_whole_objects(tmp_path: Path, monkeypatch) -> None:
    """The drive may keep any of what came after the last sync: here the new objects, and not the head before them."""
    data = memoryview(mmap.mmap(-1, OBJECT))  # aligned, as direct access needs it
    sums = checksums_of([Piece(b"", 0, OBJECT)], lambda _: data)
    assert sums is not None
    path, synced, numbers = tmp_path / FILE, bytearray(), count()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.__setitem__(slice(None), path.read_bytes()))
    file = DiskFile(tmp_path, 16 << 20)
    while file.log._generation <= len(file.log._regions):
        begun = file.log.begin([DiskObject(key(next(numbers)), OBJECT, sums)])
        assert begun is not None
        assert file.write(begun[0], [data]) is None
        file.log.end(begun[0], written=True)
    last = begun[0].objects[0].offset
    file.close()
    synced[last : last + OBJECT] = os.urandom(OBJECT)
    path.write_bytes(synced)
    again = DiskFile(tmp_path, 16 << 20)
    again.recover(memoryview(mmap.mmap(-1, OBJECT)))
    found = [again.log.find(each) for each in again.log]
    again.close()
    assert found
    assert all(each is not None and synced[each.offset : each.offset + OBJECT] == data for each in found)


async def test_a_disk_smaller_than_the_memory_comes_to_rest(redis_url: str, tmp_path: Path) -> None:
    """A log that goes round does not write again and again what is in memory."""
    many = range(20 * POOL_OBJECTS)
    async with (
        running_node(redis_url, pool_mib=32, disk_dir=str(tmp_path), disk_mib=16) as node,
        client_of(redis_url, slots=len(many)) as client,
    ):
        await client.stored(many)
        assert node.figure("objects") == len(many)
        await eventually(lambda: node.figure("disk_unsaved_objects") == 0, "nothing is left to be written")
        assert node.figure("disk_objects") > POOL_OBJECTS
