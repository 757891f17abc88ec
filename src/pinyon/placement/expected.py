"""Blocks that instances do not hold yet but will: those of the prompts that were placed there.

Mooncake §4.1 updates an instance's cache at placement. Only that instance counts on them: nobody can fetch what is not
computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pinyon.core.block_keys import BlockKey
from pinyon.placement.prefix_match import Holder

__all__ = ["ExpectedBlocks"]


class ExpectedBlocks:
    """Keys of prompts on their way, counted by instance, as prompts share them."""

    __slots__ = ("_again", "masks", "pairs")

    def __init__(self) -> None:
        self.masks: dict[BlockKey, int] = {}
        """By key the instances that expect it, a bit for each."""
        self._again: dict[int, dict[BlockKey, int]] = {}
        """By instance, of keys that several of its prompts have: how many beside the first."""
        self.pairs = 0
        """Of keys and those who expect them."""

    def __len__(self) -> int:
        """Different keys."""
        return len(self.masks)

    def add(self, holder: Holder, keys: Sequence[BlockKey]) -> None:
        """Different ones."""
        bit, masks = holder.bit, self.masks
        if masks.keys().isdisjoint(keys):  # few prompts share what nobody holds: then nothing is done key by key
            masks.update(dict.fromkeys(keys, bit))
            self.pairs += len(keys)
            return
        again = self._again.setdefault(bit, {})
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                again[key] = again.get(key, 0) + 1
            else:
                masks[key] = mask | bit
                self.pairs += 1
        if not again:
            del self._again[bit]

    def remove(self, holder: Holder, keys: Sequence[BlockKey]) -> None:
        """What was added."""
        bit, masks = holder.bit, self.masks
        again = self._again.get(bit)
        if (again is None or again.keys().isdisjoint(keys)) and list(map(masks.get, keys)).count(bit) == len(keys):
            deque(map(masks.pop, keys), maxlen=0)
            self.pairs -= len(keys)
            return
        for key in keys:
            more = again.get(key, 0) if again else 0
            if again is not None and more:
                if more > 1:
                    again[key] = more - 1
                else:
                    del again[key]
                continue
            left = masks[key] & ~bit
            self.pairs -= 1
            if left:
                masks[key] = left
            else:
                del masks[key]
        if again is not None and not again:
            del self._again[bit]

    def of(self, holder: Holder) -> int:
        """How many keys one expects (looks at all: for tests)."""
        return sum(1 for mask in self.masks.values() if mask & holder.bit)
