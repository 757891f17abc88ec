"""Objects that are on their way from memory to the disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from pinyon.eviction import EVICTION_POLICIES
from pinyon.paging import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.disk_log import SECTOR, DiskLog, DiskObject, Group
from pinyon.store.kv_object import KvObject, SlotState
from pinyon.store.objects import ObjectTable
from services.kvstore.disk_tier import DiskTier
from tests.store_integrity import check_table
from tests.waiting import WAIT_S, eventually

KEYS = [bytes([number]) * 16 for number in range(6)]


def table_of(objects: int) -> ObjectTable:
    """Returns a table with room for so many objects, above a disk."""
    log = DiskLog(b"the file", 1 << 20, 8)
    return ObjectTable(OffsetAllocator(objects * SECTOR, SECTOR), EVICTION_POLICIES.make("lru"), LeaseTable(), disk=log)


def put(table: ObjectTable, *keys: bytes) -> list[KvObject]:
    put_id, _ = table.put_start(keys, SECTOR, 0.0, 10.0)
    assert table.close_put(put_id)
    objects = table.closing(put_id)
    assert table.end_put(put_id, commit=True, now_s=0.0) == len(keys)
    return objects


def test_a_larger_object_does_not_evict_what_is_being_demoted() -> None:
    table = table_of(4)
    for each in KEYS[:4]:
        put(table, each)
    demoted = table.demote(1.0)
    assert demoted is not None
    _, (slot,) = table.put_start([KEYS[5]], 2 * SECTOR, 2.0, 10.0)
    assert slot.state is SlotState.RESERVED
    assert table.in_memory(demoted.key) is demoted, "the policy has evicted it before, and must not again"
    check_table(table)


class SlowFile:
    """A disk's file whose writes wait, and whose reads succeed."""

    def __init__(self, log: DiskLog) -> None:
        self.log = log
        self.go_on = threading.Event()

    def write(self, group: Group, rooms: Sequence[memoryview]) -> None:
        self.go_on.wait(WAIT_S)

    def read_objects(self, wanted: Sequence[object]) -> list[bool]:
        self.go_on.wait(WAIT_S)
        return [True] * len(wanted)

    def sync(self) -> None: ...
    def close(self) -> None: ...


async def test_what_is_read_beside_the_disk_is_not_demoted_meanwhile() -> None:
    table = table_of(8)
    assert table.disk is not None
    file = SlowFile(table.disk)
    group, _ = table.disk.begin([DiskObject(KEYS[1], SECTOR, b"")]) or pytest.fail("no group")
    table.disk.end(group, written=True)
    tier = DiskTier(table, file, memoryview(bytearray(8 * SECTOR)), lambda: None)  # type: ignore[arg-type]
    tier.start()
    (held,) = put(table, KEYS[0])
    assert table.demote(1.0) is held
    tier._demoting.append(held)
    tier.stored([held])
    await asyncio.sleep(0)  # the write begins
    loading = asyncio.create_task(tier.load(KEYS[:2], WAIT_S))
    await asyncio.sleep(0)
    file.go_on.set()
    await loading
    await eventually(lambda: KEYS[0] in tier.log, "it is saved")
    assert table.in_memory(KEYS[0]) is held, "its reader is about to lease it"
    await tier.close(0)


async def test_what_is_read_after_its_reader_has_gone_is_told() -> None:
    table = table_of(8)
    assert table.disk is not None
    file, told = SlowFile(table.disk), asyncio.Event()
    group, _ = table.disk.begin([DiskObject(KEYS[1], SECTOR, b"")]) or pytest.fail("no group")
    table.disk.end(group, written=True)
    tier = DiskTier(table, file, memoryview(bytearray(8 * SECTOR)), told.set)  # type: ignore[arg-type]
    await tier.load([KEYS[1]], 0.001)
    told.clear()
    file.go_on.set()
    async with asyncio.timeout(WAIT_S):
        await told.wait()
    assert table.in_memory(KEYS[1]) is not None
    await tier.close(0)


async def test_what_is_removed_while_it_is_read_stays_away() -> None:
    table = table_of(8)
    assert table.disk is not None
    file = SlowFile(table.disk)
    group, _ = table.disk.begin([DiskObject(KEYS[1], SECTOR, b"")]) or pytest.fail("no group")
    table.disk.end(group, written=True)
    tier = DiskTier(table, file, memoryview(bytearray(8 * SECTOR)), lambda: None)  # type: ignore[arg-type]
    loading = asyncio.create_task(tier.load([KEYS[1]], WAIT_S))
    await eventually(lambda: tier._reads, "the read is under way")
    assert table.remove([KEYS[1]]) == 1
    file.go_on.set()
    await loading
    assert KEYS[1] not in table
    assert table.used_bytes == 0
    check_table(table)
    await tier.close(0)
