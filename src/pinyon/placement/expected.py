"""Blocks that an instance does not hold yet but will: those of the prompts that were placed there.

Mooncake §4.1 updates an instance's cache at placement. Only that instance counts on them: nobody can fetch what is not
computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.core.block_keys import KEY_BYTES, BlockKey

__all__ = ["ExpectedBlocks"]


class ExpectedBlocks:
    """Keys of prompts on their way, counted, as prompts share them: of each, all that follow those held already."""

    __slots__ = ("_again", "_keys")

    def __init__(self) -> None:
        self._keys: set[BlockKey] = set()
        # How many prompts beside the first: few keys are shared, and whole sets are joined and parted quickly.
        self._again: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Sequence[BlockKey]) -> None:
        again = self._again
        for key in self._keys.intersection(keys):
            again[key] = again.get(key, 0) + 1
        self._keys.update(keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """What was added."""
        again = self._again
        others = again.keys() & keys
        for key in others:
            left = again[key] - 1
            if left:
                again[key] = left
            else:
                del again[key]
        self._keys.difference_update(keys)
        self._keys |= others

    def leading(self, packed_keys: bytes, held: int, limit: int) -> int:
        """How many of the first ``limit`` keys are held or expected, given that ``held`` of them are held.

        Keys are chained, so whoever has one of those that follow has all before it: the end is found by halving.
        """
        known = self._keys
        high = min(limit, len(packed_keys) // KEY_BYTES)
        if not known or held >= high or packed_keys[held * KEY_BYTES : (held + 1) * KEY_BYTES] not in known:
            return held
        low = held + 1
        while low < high:
            middle = (low + high + 1) // 2
            if packed_keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES] in known:
                low = middle
            else:
                high = middle - 1
        return low
