"""The kernel's account of memory for which huge pages were requested, and of memory that is to be there early."""

from __future__ import annotations

import mmap
import platform
import time
from pathlib import Path

import numpy as np
import pytest

from pinyon.runtime import big_memory
from pinyon.runtime.big_memory import HUGE_PAGE_BYTES, BigMemory, memory_left, prefer_huge_pages

SMAPS = Path("/proc/self/smaps")
PAGEMAP = Path("/proc/self/pagemap")
WAIT_S = 60.0


def flags_at(address: int) -> list[str]:
    """Returns the flags of the mapping that contains this address (proc(5), VmFlags)."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


def present(memory: memoryview) -> int:
    """Returns how many of the memory's pages the kernel has provided (proc(5), pagemap, bit 63)."""
    with PAGEMAP.open("rb") as pages:
        pages.seek(address_of(memory) // mmap.PAGESIZE * 8)
        return int((np.frombuffer(pages.read(memory.nbytes // mmap.PAGESIZE * 8), np.uint64) >> 63).sum())


def address_of(memory: object) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


@pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has none"
)
@pytest.mark.parametrize(("pages", "asked"), [(4, True), (1, False)])
def test_whole_pages_within_the_memory_are_asked_for(pages, asked):
    with mmap.mmap(-1, 6 * HUGE_PAGE_BYTES) as memory:
        page = -(-address_of(memory) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        prefer_huge_pages(page + 100, pages * HUGE_PAGE_BYTES)
        assert ("hg" in flags_at(page + HUGE_PAGE_BYTES)) == asked
        assert "hg" not in flags_at(page), "it is not all theirs"


@pytest.mark.skipif(not PAGEMAP.exists(), reason="this system gives no account of memory")
@pytest.mark.skipif(
    [int(each) for each in platform.release().split("-")[0].split(".")[:2] if each.isdigit()] < [5, 14],
    reason="this kernel provides pages on first use only",
)
def test_big_memory_is_there_before_it_is_written():
    memory = BigMemory(5 * HUGE_PAGE_BYTES + 8192)
    try:
        end_s = time.monotonic() + WAIT_S
        while present(memory.view) < memory.view.nbytes // mmap.PAGESIZE:
            assert time.monotonic() < end_s, present(memory.view)
            time.sleep(0.01)
        assert not any(memory.view[:: 1 << 12])
    finally:
        memory.close()


def test_big_memory_can_be_closed_at_once_and_still_used():
    memory = BigMemory(64 * HUGE_PAGE_BYTES)
    memory.close()
    memory.view[-1] = 7
    assert memory.view[0] == 0
    assert memory.view[-1] == 7


@pytest.mark.skipif(not PAGEMAP.exists(), reason="this system gives no account of memory")
def test_big_memory_that_is_not_left_waits_for_its_use(monkeypatch, caplog):
    monkeypatch.setattr(big_memory, "memory_left", lambda: 3 << 20)
    memory = BigMemory(2 * HUGE_PAGE_BYTES)
    memory._thread.join(WAIT_S)
    assert not present(memory.view)
    assert "4 MiB are still to be used, and 3 MiB are left" in caplog.text
    memory.close()


@pytest.mark.parametrize(("limit", "left"), [("5000\n", 2000), ("max\n", None)])
def test_a_containers_limit_counts_as_memory_left(monkeypatch, tmp_path, limit, left):
    files = tmp_path / "max", tmp_path / "current"
    files[0].write_text(limit)
    files[1].write_text("3500\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 500\nactive_file 0\n")
    without = memory_left()
    monkeypatch.setattr(big_memory, "_LIMITS", (files, (tmp_path / "none", tmp_path / "none")))
    if left is None:
        assert (memory_left() is None) == (without is None)
    else:
        assert memory_left() == left
