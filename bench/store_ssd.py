"""Reads of a store node's disk tier, beside plain O_DIRECT reads of the same file in as many threads.

The tier finds room for the objects in the pool, checks every byte and makes the objects readable. Both take turns at
neighbouring objects of the file, so neither reads what the other has just brought into a cache of the disk."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_digest

from bench.peers import PeerUnavailable
from bench.report import Aim, progress
from bench.store_figures import KIB, MIB, size_label
from pinyon.eviction import EVICTION_POLICIES
from pinyon.paging import LeaseTable
from pinyon.runtime.big_memory import BigMemory
from pinyon.runtime.eviction_choice import whole_choice
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.disk_log import SECTOR, DiskObject, sectors
from pinyon.store.objects import ObjectTable
from services.kvstore.disk_file import FILE, DiskFile
from services.kvstore.disk_tier import THREADS, DiskTier

READS = ((64, MIB), (8, 4 * MIB), (64, 64 * KIB))
"""The number and size of the objects that are read together."""
AIM = 0.8
"""The least share of the plain reads' rate."""
FILE_BYTES = 1 << 30
POOL_BYTES = 256 << 20
WITHIN_S = 30.0

Place = tuple[int, memoryview]


def measure_ssd(turns: int) -> dict[str, Any]:
    """Returns the figures of each kind of read. Raises :class:`PeerUnavailable` without a disk for direct reads."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            f"{count} × {size_label(size)}": asyncio.run(_measure(Path(folder), size, count, turns))
            for count, size in READS
        }


async def _measure(folder: Path, size: int, count: int, turns: int) -> dict[str, Any]:
    (folder / FILE).unlink(missing_ok=True)
    disk, pool = DiskFile(folder, FILE_BYTES), BigMemory(POOL_BYTES)
    if not disk.direct:
        raise PeerUnavailable(f"the file system of {folder} has no direct reads")
    policy = EVICTION_POLICIES.make(whole_choice("lru", time.monotonic))
    leases: LeaseTable = LeaseTable(first_id=1, max_leases=1)
    table = ObjectTable(OffsetAllocator(POOL_BYTES, SECTOR), policy, leases, disk=disk.log)
    keys = _write_objects(disk, pool.view, size)
    tier = DiskTier(table, disk, pool.view, lambda: None)
    landing = BigMemory(
        count * sectors(size)
    )  # memory of the same kind, as the size of its pages shows in direct reads
    rooms = [landing.view[at * sectors(size) : (at + 1) * sectors(size)] for at in range(count)]
    for room in rooms:
        room[:] = bytes(len(room))  # the pages are there
    direct = os.open(folder / FILE, os.O_RDONLY | os.O_DIRECT)
    loop, threads, choice = asyncio.get_running_loop(), ThreadPoolExecutor(THREADS), random.Random(1)

    def read(some: Sequence[Place]) -> None:
        for offset, room in some:
            assert os.preadv(direct, [room], offset) == len(room)

    async def plain(chosen: Sequence[bytes]) -> None:
        offsets = sorted(found.offset for found in map(disk.log.find, chosen) if found is not None)
        places = list(zip(offsets, rooms, strict=True))
        step = -(-count // THREADS)
        parts = [places[start : start + step] for start in range(0, count, step)]
        await asyncio.gather(*[loop.run_in_executor(threads, read, part) for part in parts])

    spent: dict[str, list[float]] = {"tier": [], "plain": []}
    for turn in range(turns):
        first = choice.randrange(len(keys) - 2 * count)
        mine, others = keys[first : first + count], keys[first + count : first + 2 * count]
        calls = [("tier", tier.load(mine, WITHIN_S)), ("plain", plain(others))]
        for name, call in calls if turn % 2 else reversed(calls):
            began_s = time.perf_counter()
            await call
            spent[name].append(time.perf_counter() - began_s)
        assert all(table.in_memory(key) for key in mine)
        while (held := table.demote(time.monotonic())) is not None:
            table.demoted(held)
    await tier.close(WITHIN_S)
    os.close(direct)
    medians = {name: statistics.median(each) for name, each in spent.items()}
    ratios = [plain_s / tier_s for tier_s, plain_s in zip(spent["tier"], spent["plain"], strict=True)]
    nbytes = count * size
    return {
        "tier_ms": round(medians["tier"] * 1e3, 2),
        "plain_ms": round(medians["plain"] * 1e3, 2),
        "tier_gb_s": round(nbytes / medians["tier"] / 1e9, 2),
        "plain_gb_s": round(nbytes / medians["plain"] / 1e9, 2),
        "ratio": round(statistics.median(ratios), 2),
    }


def _write_objects(disk: DiskFile, pool: memoryview, size: int) -> list[bytes]:
    """Fills half of the file with equal objects; returns their keys in the order of the file."""
    data = os.urandom(size).ljust(sectors(size), b"\0")
    pool[: len(data)] = data
    keys = [number.to_bytes(16, "big") for number in range(1, FILE_BYTES // 2 // size)]
    checksum, at_once = xxh3_64_digest(data[:size]), max(1, min(256, (16 << 20) // size))
    for start in range(0, len(keys), at_once):
        begun = disk.log.begin([DiskObject(key, size, checksum) for key in keys[start : start + at_once]])
        assert begun is not None
        group, _ = begun
        assert disk.write(group, [pool[: len(data)]] * len(group.objects)) is None
        disk.log.end(group, written=True)
    disk.sync()
    return keys


def ssd_aims(found: dict[str, Any], reason: str) -> list[Aim]:
    """Returns one aim for each kind of read; ``reason`` says why nothing was measured."""
    return [
        Aim(
            f"read {count} × {size_label(size)} from SSD, share of plain reads",
            AIM,
            found.get(f"{count} × {size_label(size)}", {}).get("ratio"),
            False,
            reason,
        )
        for count, size in READS
    ]


def said(found: dict[str, Any]) -> str:
    """Returns the figures as lines for people."""
    return "\n".join(
        f"SSD, {name}: {each['tier_ms']} ms ({each['tier_gb_s']} GB/s) into the pool, checked; "
        f"{each['plain_ms']} ms plain; share of the plain rate {each['ratio']}"
        for name, each in found.items()
    )


if __name__ == "__main__":
    progress(said(measure_ssd(8)))
