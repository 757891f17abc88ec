"""An allocator of offsets in a pool of bytes: best fit over the holes, with neighbours merged at once. Pure.

It comes with an account of idle objects, which nobody reads, and of the room that they would give to others."""

from __future__ import annotations

from bisect import bisect_left, insort

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
        self.hole_at: dict[int, int] = {}  # offset → size
        self.hole_before: dict[int, int] = {}  # end → offset
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
        before = self.hole_before.get(offset)
        if before is not None:
            size += self._drop_hole(before)
            offset = before
        if offset + size in self.hole_at:
            size += self._drop_hole(offset + size)
        self._add_hole(offset, size)

    def _add_hole(self, offset: int, size: int) -> None:
        self.hole_at[offset] = size
        self.hole_before[offset + size] = offset
        offsets = self._holes.get(size)
        if offsets is None:
            self._holes[size] = {offset: None}
            insort(self._sizes, size)
        else:
            offsets[offset] = None

    def _drop_hole(self, offset: int) -> int:
        size = self.hole_at.pop(offset)
        del self.hole_before[offset + size]
        offsets = self._holes[size]
        del offsets[offset]
        if not offsets:
            del self._holes[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return size


class IdleRoom:
    """The idle objects, in the order in which they became idle. The caller reports each that does or ceases to be.

    Calls cost O(1), if they do not say otherwise."""

    def __init__(self, allocator: OffsetAllocator) -> None:
        self._allocator = allocator
        self._at: dict[int, tuple[bytes, int]] = {}  # offset → key, end
        self._before: dict[int, int] = {}  # end → offset
        self._sizes: dict[int, int] = {}  # size with its rounding → objects
        self._no_run = (float("-inf"), 0)
        self.all_bytes = 0
        """The bytes of all idle objects, with their rounding."""

    def add(self, key: bytes, offset: int, size_bytes: int) -> None:
        """Takes note of an object that became idle."""
        size = self._allocator.rounded(size_bytes)
        self._at[offset] = key, offset + size
        self._before[offset + size] = offset
        self._sizes[size] = self._sizes.get(size, 0) + 1
        self.all_bytes += size

    def take(self, offset: int) -> None:
        """Takes note of an object that is no longer idle."""
        _, end = self._at.pop(offset)
        del self._before[end]
        size = end - offset
        self._sizes[size] -= 1
        if not self._sizes[size]:
            del self._sizes[size]
        self.all_bytes -= size

    @property
    def largest_bytes(self) -> int:
        """The size of the largest idle object, with its rounding."""
        return max(self._sizes, default=0)

    def run(self, offset: int, needed: int) -> tuple[list[bytes], int]:
        """Returns the keys of an idle object and of neighbours that make room with it, and the bytes of that room.

        Holes count as room, and it ends as soon as it is large enough. O(keys)."""
        holes, at, end, keys = self._allocator, offset, offset, []
        while end - at < needed and (end in self._at or end in holes.hole_at):
            if end in self._at:
                key, end = self._at[end]
                keys.append(key)
            else:
                end += holes.hole_at[end]
        while end - at < needed and (at in self._before or at in holes.hole_before):
            if at in self._before:
                at = self._before[at]
                keys.append(self._at[at][0])
            else:
                at = holes.hole_before[at]
        return keys, end - at

    def any_run(self, needed: int, now_s: float, *, believe: bool = True) -> list[bytes]:
        """Returns the keys of neighbours that make room together, rather of objects that have long been idle; or none.

        O(objects) at worst. If there are none, that is believed for ``NO_RUN_S`` (unless the caller does not), so that
        repeated requests do not repeat the search."""
        looked_s, refused = self._no_run
        if believe and now_s < looked_s + NO_RUN_S and needed >= refused:
            return []
        seen: set[bytes] = set()
        for offset, (key, _) in self._at.items():
            if key not in seen:
                keys, room = self.run(offset, needed)
                if room >= needed:
                    return keys
                seen.update(keys)
        self._no_run = now_s, needed
        return []
