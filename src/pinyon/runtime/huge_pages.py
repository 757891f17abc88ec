"""Memory in pages of 2 MiB, for tables that are read all over: of small pages the processor remembers where some
thousand are, and what lies in another one takes three times as long to read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

__all__ = ["HUGE_PAGE_BYTES", "prefer_huge_pages"]

HUGE_PAGE_BYTES = 2 << 20


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask for them, as far as whole ones lie in this memory (``madvise(2)``, MADV_HUGEPAGE). Pages that nobody touches
    cost nothing, as before. Where the system has none, nothing happens."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole = (address + nbytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if advice is None or whole <= 0:
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), ctypes.c_int(advice))
