"""The instances that decode requests of each prefix: there, one more such request adds little for a batch to read.

Instances report their largest groups of requests; unfinished placements are added. How much later requests will
share with a placement is not known yet, so a placement counts at several depths, each four times the one before.
Until the instance reports the prefix, a look-up finds at least a quarter of the shared part, in whole levels.
Instances that read shared KV once for each request are left out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Final

from pinyon.core.block_keys import KEY_BYTES, BlockKey, SharedPrefix

DEPTHS_MAX: Final = 64
"""The limit of different depths of reports, and likewise of placements: a look-up tries each. Others do not count."""
FOUND_MAX: Final = 32
"""The maximum number of instances that one look-up finds. If more decode the prefix, some of these mostly have room."""
DEPTH_STEP: Final = 4
"""The ratio of a placement's depth to the one before: each depth takes time when a placement begins and ends."""
MARKS_MAX: Final = 1 << 18
"""The maximum number of marks of placements, ~60 MB. Placements beyond this limit look as if they shared nothing."""


Mark = tuple[int, BlockKey]
"""A depth in blocks and the key there. Not a named tuple, which is slow to make: every mark needs one."""


class SharedPrefixes:
    """Shared prefixes by rows of the load table. ``used``: False if nobody asks for them; then nothing is kept."""

    def __init__(self) -> None:
        self.used = True
        self._depths: list[int] = []
        """The depths of all marks, in ascending order."""
        self._depths_said: dict[int, int] = {}
        self._depths_placed: dict[int, int] = {}
        """The number of marks at each depth: of reports above, of placements here."""
        self._rows: dict[int, dict[BlockKey, dict[int, int]]] = {}
        """The number of marks of each row, from reports and placements, by depth in blocks and then by key."""
        self._levels: dict[int, int] = {}
        """The blocks per level of instances that read shared KV once per batch, by row."""
        self._said: dict[int, tuple[SharedPrefix, ...]] = {}
        """The last report of each row."""
        self._counted: dict[int, list[Mark]] = {}
        """The counted marks of the last report of each row."""
        self._marks = 0

    def __len__(self) -> int:
        """Returns the number of prefixes, one for each depth and key."""
        return sum([len(keys) for keys in self._rows.values()])

    @property
    def empty(self) -> bool:
        return not self._depths

    def reported(self, row: int, level_blocks: int, shared: tuple[SharedPrefix, ...]) -> None:
        """Stores the instance's new report; if its level is 0, nothing is kept."""
        same = level_blocks == self._levels.get(row, 0) and shared == self._said.get(row, ())
        # A mark that had no place because of too many depths may have one by now.
        if not self.used or (same and len(self._counted.get(row, ())) == len(shared)):
            return
        for mark in self._counted.pop(row, ()):
            self._count(row, mark, -1, self._depths_said)
        self._levels.pop(row, None)
        self._said.pop(row, None)
        if level_blocks <= 0:
            return
        self._levels[row], self._said[row] = level_blocks, shared
        marks = [(each.blocks, each.key) for each in shared]
        self._counted[row] = [mark for mark in marks if self._count(row, mark, 1, self._depths_said)]

    def placed(self, row: int, block_keys: bytes) -> Sequence[Mark]:
        """Counts a request that is decoded there, by its packed keys. Returns its marks for :meth:`ended`."""
        depth = self._levels.get(row, 0)
        marks: list[Mark] = []
        while 0 < depth * KEY_BYTES <= len(block_keys) and self._marks < MARKS_MAX:
            mark = depth, block_keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            if self._count(row, mark, 1, self._depths_placed):
                marks.append(mark)
                self._marks += 1
            depth *= DEPTH_STEP
        return marks

    def ended(self, row: int, marks: Sequence[Mark]) -> None:
        for mark in marks:
            self._count(row, mark, -1, self._depths_placed)
        self._marks -= len(marks)

    def found(self, block_keys: bytes, row: int) -> dict[int, int]:
        """Returns how many blocks a request with these packed keys would share, by rows that decode such requests. They
        are at most :data:`FOUND_MAX` rows, those that share most, and ``row`` in any case."""
        found: dict[int, int] = {}
        depths = self._depths
        for place in range(len(depths) - 1, -1, -1):
            end = depths[place] * KEY_BYTES
            if end > len(block_keys):
                continue
            rows = self._rows[depths[place]].get(block_keys[end - KEY_BYTES : end])
            if rows is None:
                continue
            if row in rows and row not in found:
                found[row] = depths[place]
            for each in rows:
                if len(found) >= FOUND_MAX:
                    break
                if each not in found:
                    found[each] = depths[place]
        return found

    def _count(self, row: int, mark: Mark, sign: int, depths: dict[int, int]) -> bool:
        """Counts a mark once more or once less. Returns False if its depth would be one too many."""
        depth, key = mark
        of_depth = depths.get(depth, 0) + sign
        if of_depth == 0:
            del depths[depth]
        elif of_depth == 1 and sign > 0 and len(depths) >= DEPTHS_MAX:
            return False
        else:
            depths[depth] = of_depth
        keys = self._rows.get(depth)
        if keys is None:
            keys = self._rows[depth] = {}
            insort(self._depths, depth)
        rows = keys.get(key)
        if rows is None:
            rows = keys[key] = {}
        left = rows.get(row, 0) + sign
        if left:
            rows[row] = left
            return True
        del rows[row]
        if not rows:
            del keys[key]
            if not keys:
                del self._rows[depth]
                self._depths.remove(depth)
        return True

    def check_integrity(self) -> None:
        """Asserts that the books agree (for tests and idle times)."""
        assert self._depths == sorted(self._rows) == sorted({*self._depths_said, *self._depths_placed})
        assert all(keys and all(keys.values()) for keys in self._rows.values())
        counts = sum([sum(rows.values()) for keys in self._rows.values() for rows in keys.values()])
        assert counts == self._marks + sum([len(marks) for marks in self._counted.values()])
