"""A look-up in the block index: along a prompt's keys, until one that nobody holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pinyon.core.block_keys import KEY_BYTES, unpack_keys
from pinyon.core.key_sample import sample_with_blocks
from pinyon.placement.expected import ExpectedBlocks, ExpectedInDict
from pinyon.placement.key_table import KeyTable, Slots, fingerprints
from pinyon.placement.prefix_match import NO_MATCH, PrefixMatch

__all__ = ["look_up"]

_FEW_KEYS = 24
"""Are looked for one by one: an operation on arrays costs as much as a key."""
_FIRST_KEYS = 128
"""Of more, are looked for together, then more and more: a prompt may end here in the index. Two looks for few keys take
as long as one for twice as many."""
_MORE = 4

HoldersOf = Callable[[int], int]
"""Number of a set → bits of its holders."""


def look_up(
    table: KeyTable, holders_of: HoldersOf, packed_keys: bytes, expected: ExpectedBlocks | None, every: int
) -> tuple[Slots, PrefixMatch]:
    """The slots of what was found, and who holds how much of the prompt; of the keys, one in ``every`` counts."""
    blocks = None
    if every > 1:
        packed_keys, blocks = sample_with_blocks(packed_keys, every)
    walk = _Walk(table, holders_of, packed_keys, blocks)
    soon = walk.soon(expected) if expected else None
    if not walk.found and soon is None:
        return walk.slots, NO_MATCH
    return walk.slots, PrefixMatch(walk.runs, walk.block(walk.found), soon)


class _Walk:
    """``runs`` of equal holders along the first ``found`` keys of the sample."""

    def __init__(
        self, table: KeyTable, holders_of: HoldersOf, packed_keys: bytes, blocks: NDArray[np.int64] | None
    ) -> None:
        self._table, self._holders_of = table, holders_of
        self._keys, self._blocks = packed_keys, blocks
        self._count = len(packed_keys) // KEY_BYTES
        self.runs: list[tuple[int, int]] = []
        self.found = 0
        self.slots: Slots = np.zeros(0, np.int64)
        if 0 < self._count <= _FEW_KEYS:
            self._look_for_few()
        elif self._count and self._holds_first():
            self._look()

    def block(self, key: int) -> int:
        """The first block that this key of the sample tells of; of the one after the last key, where they end."""
        if self._blocks is None or not key:
            return key
        return int(self._blocks[key - 1]) + 1

    def _holds_first(self) -> int:
        """The first key alone: most prompts that miss, miss here."""
        slots = self._table.find_leading(self._keys[:KEY_BYTES])
        return self._holders_of(self._table.set_ids_one[slots[0]]) if slots else 0

    def _look_for_few(self) -> None:
        slots = self._table.find_leading(self._keys)
        before, holders = -1, 0
        for at, number in enumerate(map(self._table.set_ids_one.__getitem__, slots)):
            if number != before:
                before, held = number, self._holders_of(number)
                if not held:  # all of them have gone
                    del slots[at:]
                    break
                if held != holders:
                    self.runs.append((self.block(at), held))
                    holders = held
        self.found = len(slots)
        self.slots = np.array(slots, np.int64)

    def _look(self) -> None:
        prints = fingerprints(self._keys)
        parts: list[Slots] = []
        before, holders, at, end = -1, 0, 0, _FIRST_KEYS
        while at < self._count:
            slots = self._table.locate(prints[at:end])
            missing = (slots < 0).nonzero()[0]
            if len(missing):
                slots = slots[: missing[0]]
            numbers = self._table.set_ids[slots]
            changes = (numbers[1:] != numbers[:-1]).nonzero()[0] + 1
            for offset in (0, *changes.tolist()) if len(slots) else ():
                number = int(numbers[offset])
                if number == before:
                    continue
                before, held = number, self._holders_of(number)
                if not held:  # all of them have gone
                    slots = slots[:offset]
                    break
                if held != holders:
                    self.runs.append((self.block(at + offset), held))
                    holders = held
            parts.append(slots)
            self.found = at + len(slots)
            if self.found < min(end, self._count):
                break
            at, end = end, end * _MORE
        self.slots = np.concatenate(parts)

    def soon(self, expected: ExpectedBlocks) -> PrefixMatch | None:
        """With what is expected; None: nothing more is."""
        assert isinstance(expected, ExpectedInDict), "a table is looked at key by key"
        keys = unpack_keys(self._keys)
        if expected.masks.keys().isdisjoint(keys):
            return None
        coming = list(map(expected.masks.get, keys))
        held = self._table.set_ids[self.slots].tolist()
        if self.found < self._count and coming[self.found] is not None:  # it goes on
            slots = self._table.locate(fingerprints(self._keys[self.found * KEY_BYTES :]))
            held += np.where(slots < 0, 0, self._table.set_ids[slots]).tolist()
        runs: list[tuple[int, int]] = []
        before: tuple[int, int | None] | None = None
        more, key = False, 0
        for key, both in enumerate(zip(held, coming, strict=False)):
            if both == before:
                continue
            mask = self._holders_of(both[0]) | (both[1] or 0)
            if not mask:
                break
            more = more or both[1] is not None
            if not runs or mask != runs[-1][1]:
                runs.append((self.block(key), mask))
            before = both
        else:
            key = len(held)
        return PrefixMatch(runs, self.block(key)) if more else None
