"""Blocks that an instance does not hold yet but will: those of the prompts that were placed there.

Mooncake §4.1 updates an instance's cache at placement. Only that instance counts on them: nobody can fetch what is not
computed.
"""

from __future__ import annotations

from pinyon.core.block_keys import KEY_BYTES, BlockKey, unpack_keys

__all__ = ["ExpectedBlocks"]


class ExpectedBlocks:
    """Keys of prompts on their way, counted, as prompts share them. Each prompt's are added from its first block on."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, packed_keys: bytes) -> None:
        counts = self._counts
        for key in unpack_keys(packed_keys):
            counts[key] = counts.get(key, 0) + 1

    def remove(self, packed_keys: bytes) -> None:
        """What was added."""
        counts = self._counts
        for key in unpack_keys(packed_keys):
            left = counts[key] - 1
            if left:
                counts[key] = left
            else:
                del counts[key]

    def leading(self, packed_keys: bytes, limit: int) -> int:
        """How many of the first ``limit`` keys are expected.

        Keys are chained, so whoever has one has all before it: the end is found by halving.
        """
        counts = self._counts
        if not counts or limit < 1 or packed_keys[:KEY_BYTES] not in counts:
            return 0
        low, high = 1, min(limit, len(packed_keys) // KEY_BYTES)
        while low < high:
            middle = (low + high + 1) // 2
            if packed_keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES] in counts:
                low = middle
            else:
                high = middle - 1
        return low
