"""The ranges of bytes of a region that are open, in order and apart from each other. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from pinyon.transfer.types.errors import InvalidTransfer

MAX_SPANS = 1 << 16
"""The maximum number of ranges that a peer is told in one answer, and about as many as the peer remembers."""


class Spans(NamedTuple):
    """Ranges of bytes in order: none is empty, none touches the next."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    """Bytes from the start of the region; the last byte of a span is before its end."""

    def holding(self, start: int, end: int) -> int:
        """Returns the index of the one span that holds ``[start, end)``, or -1 if there is none."""
        index = bisect_right(self.starts, start) - 1
        return index if index >= 0 and end <= self.ends[index] else -1


def merge_ranges(ranges: Iterable[tuple[int, int]], length: int) -> Spans:
    """Merges ``(offset, length)`` ranges, in any order, of a region with ``length`` bytes.

    Raises InvalidTransfer for no range at all, an empty range, or one that reaches outside the region."""
    starts: list[int] = []
    ends: list[int] = []
    for start, size in sorted(ranges):
        end = start + size
        if size < 1 or start < 0 or end > length:
            raise InvalidTransfer(f"{size} bytes at {start} are no range of {length} bytes", field="ranges")
        if ends and start <= ends[-1]:
            ends[-1] = max(end, ends[-1])
        else:
            starts.append(start)
            ends.append(end)
    if not starts:
        raise InvalidTransfer("no range is named", field="ranges")
    return Spans(tuple(starts), tuple(ends))
