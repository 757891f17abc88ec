"""The kernel's account of memory for which huge pages were requested."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from pinyon.runtime.process import HUGE_PAGE_BYTES, prefer_huge_pages

SMAPS = Path("/proc/self/smaps")


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


@pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has none"
)
@pytest.mark.parametrize(("pages", "asked"), [(4, True), (1, False)])
def test_whole_pages_within_the_memory_are_asked_for(pages, asked):
    with mmap.mmap(-1, 6 * HUGE_PAGE_BYTES) as memory:
        start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        page = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        prefer_huge_pages(page + 100, pages * HUGE_PAGE_BYTES)
        assert ("hg" in flags_at(page + HUGE_PAGE_BYTES)) == asked
        assert "hg" not in flags_at(page), "it is not all theirs"
