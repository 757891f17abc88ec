"""An allocator of offsets in a pool of bytes: best fit over the holes, with neighbours merged at once. Pure.

It comes with an account of idle objects, which nobody reads, and of the room that they would give to others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

NO_RUN_S = 1.0
"""The seconds for which it is assumed that no neighbouring idle objects make room for an object of some size."""


class OffsetAllocator:
    """An allocator of ranges of ``[0, capacity_bytes)`` that never overlap, aligned in offset and size.

    The hole is found by binary search over the *distinct* sizes of holes, which are few even when holes are many: the
    objects of one model are all alike. Best fit matters for the same reason: one eviction frees exactly what the next
    object of that model needs."""

    def __init__(self, capacity_bytes: int, alignment_bytes: int = 64) -> None:
        if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
            raise ValueError(f"the alignment must be a power of two, got {alignment_bytes}")
        self._alignment = alignment_bytes
        self.capacity_bytes = capacity_bytes // alignment_bytes * alignment_bytes
        if self.capacity_bytes <= 0:
            raise ValueError(f"{capacity_bytes} bytes hold nothing at an alignment of {alignment_bytes}")
        self.used_bytes = 0
        """The bytes taken, including the rounding up to the alignment."""
        self._taken: dict[int, int] = {}  # offset → size
        self._hole_at: dict[int, int] = {}  # offset → size
        self._hole_before: dict[int, int] = {}  # end → offset
        self._holes: dict[int, dict[int, None]] = {}  # size → offsets
        self._sizes: list[int] = []  # the keys of _holes, sorted
        self._add_hole(0, self.capacity_bytes)

    @property
    def largest_hole_bytes(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def rounded(self, size_bytes: int) -> int:
        """Returns the bytes that an object of this size takes."""
        return -(-size_bytes // self._alignment) * self._alignment

    def allocate(self, size_bytes: int) -> int | None:
        """Returns the offset of a range of at least this size; None if no hole is large enough."""
        if size_bytes <= 0:
            raise ValueError(f"an object has at least one byte, got {size_bytes}")
        size = self.rounded(size_bytes)
        position = bisect_left(self._sizes, size)
        if position == len(self._sizes):
            return None
        hole_size = self._sizes[position]
        offset = next(iter(self._holes[hole_size]))
        self._drop_hole(offset)
        if hole_size > size:
            self._add_hole(offset + size, hole_size - size)
        self._taken[offset] = size
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Gives a range back. Raises ``ValueError`` if it was not handed out (or was given back before)."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ValueError(f"nothing was allocated at {offset}")
        self.used_bytes -= size
        before = self._hole_before.get(offset)
        if before is not None:
            size += self._drop_hole(before)
            offset = before
        if offset + size in self._hole_at:
            size += self._drop_hole(offset + size)
        self._add_hole(offset, size)

    def fewest_to_free(self, size_bytes: int, may_go: Iterable[int]) -> list[int] | None:
        """Returns which of the ranges at these offsets to free so that ``size_bytes`` fit: the fewest bytes, in order.

        Neighbouring holes count as room. Returns None if no run of holes and such ranges is long enough. O(n log n)."""
        needed = self.rounded(size_bytes)
        places = sorted(
            [*((at, size, False) for at, size in self._hole_at.items())]
            + [(at, self._taken[at], True) for at in may_go]
        )
        best: list[int] | None = None
        least = 0
        run: deque[tuple[int, int, bool]] = deque()
        room = given = end = 0
        for at, size, taken in places:
            if at != end:
                run.clear()
                room = given = 0
            end = at + size
            run.append((at, size, taken))
            room += size
            given += size if taken else 0
            while room - run[0][1] >= needed:
                _, first, was_taken = run.popleft()
                room -= first
                given -= first if was_taken else 0
            if room >= needed and (best is None or given < least):
                best, least = [each for each, _, was_taken in run if was_taken], given
        return best

    def _add_hole(self, offset: int, size: int) -> None:
        self._hole_at[offset] = size
        self._hole_before[offset + size] = offset
        offsets = self._holes.get(size)
        if offsets is None:
            self._holes[size] = {offset: None}
            insort(self._sizes, size)
        else:
            offsets[offset] = None

    def _drop_hole(self, offset: int) -> int:
        size = self._hole_at.pop(offset)
        del self._hole_before[offset + size]
        offsets = self._holes[size]
        del offsets[offset]
        if not offsets:
            del self._holes[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return size


class IdleRoom:
    """The sizes of the idle objects. The caller reports each object that becomes idle or ceases to be."""

    def __init__(self, allocator: OffsetAllocator) -> None:
        self._allocator = allocator
        self._sizes: dict[int, int] = {}  # size with its rounding → objects
        self._no_run = (float("-inf"), 0)

    def count(self, size_bytes: int, change: int) -> None:
        """Counts an object of this size that became idle (``change`` 1) or is no longer idle (-1)."""
        size = self._allocator.rounded(size_bytes)
        count = self._sizes.get(size, 0) + change
        if count:
            self._sizes[size] = count
        else:
            del self._sizes[size]

    @property
    def largest_bytes(self) -> int:
        """The size of the largest idle object, with its rounding."""
        return max(self._sizes, default=0)

    def side_by_side(self, object_bytes: int, now_s: float, every: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """Returns the keys of neighbouring objects that make room together, with as few bytes as possible; or none.

        ``every``: offset and key of each idle object, read only if needed. If none make room, that is believed for
        ``NO_RUN_S``, so that repeated requests do not repeat the search."""
        looked_s, refused_bytes = self._no_run
        if now_s < looked_s + NO_RUN_S and object_bytes >= refused_bytes:
            return []
        idle = dict(every)
        found = self._allocator.fewest_to_free(object_bytes, idle)
        if found is None:
            self._no_run = (now_s, object_bytes)
            return []
        return [idle[offset] for offset in found]
