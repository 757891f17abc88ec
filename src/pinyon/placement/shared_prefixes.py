"""The instances that decode requests of each prefix: there one more such request adds little for a batch to read.

Instances report their largest groups; placements that have not ended are added. What later requests will share with a
placement is not known yet, so it counts at depths each of which is four times the one before. What is found is thus at
least a quarter of what is shared, as far as whole levels go, until the instance reports it. Instances that read shared
KV once for each request are left out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Final

from pinyon.core.block_keys import KEY_BYTES, BlockKey, SharedPrefix

DEPTHS_MAX: Final = 64
"""The limit of different depths that a look-up tries; reports at further ones do not count. Placements have as many."""
FOUND_MAX: Final = 32
"""The limit of instances that one look-up finds. Where more decode the prefix, some of these mostly have room."""
DEPTH_STEP: Final = 4
"""The ratio of a placement's depth to the one before: each depth takes time, at every placement and at its end."""
MARKS_MAX: Final = 1 << 18
"""The limit of placements' marks, ~60 MB. Placements beyond it only look as if they shared nothing."""


Mark = tuple[int, BlockKey]
"""A depth in blocks and the key there. Not a named tuple: those are slow to make, and every mark is one."""


class SharedPrefixes:
    """Shared prefixes by rows of the load table. ``used``: False where nobody asks, then nothing is kept."""

    def __init__(self) -> None:
        self.used = True
        self._depths: list[int] = []
        """The depths of all marks, in order."""
        self._depths_said: dict[int, int] = {}
        self._depths_placed: dict[int, int] = {}
        """The numbers of marks at each depth, of reports and of placements."""
        self._rows: dict[int, dict[BlockKey, dict[int, int]]] = {}
        """The number of marks of each row, by depth in blocks and by the key there, from reports and placements."""
        self._levels: dict[int, int] = {}
        """Blocks of a level, by row, for instances that read shared KV once."""
        self._said: dict[int, tuple[SharedPrefix, ...]] = {}
        """The last report of each row."""
        self._counted: dict[int, list[Mark]] = {}
        """The marks of each row's last report that are counted."""
        self._marks = 0

    def __len__(self) -> int:
        """Returns the number of prefixes at their depths."""
        return sum([len(keys) for keys in self._rows.values()])

    @property
    def empty(self) -> bool:
        return not self._depths

    def reported(self, row: int, level_blocks: int, shared: tuple[SharedPrefix, ...]) -> None:
        """Stores what the instance reports now; with a level of 0 nothing is kept."""
        same = level_blocks == self._levels.get(row, 0) and shared == self._said.get(row, ())
        # A mark that was at one depth too many may have its place by now.
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
        """Counts a request with these packed keys that is decoded there. Returns its marks for :meth:`ended`."""
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
        """Returns the blocks that a request with these packed keys would share, by rows that decode such requests. They
        are at most :data:`FOUND_MAX`, those that share most, and ``row`` in any case."""
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
        """Counts a mark once more, or once less. Returns False if it would be at one depth too many."""
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
