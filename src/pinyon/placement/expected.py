"""Blocks that instances do not hold yet but will: those of the prompts that were placed there.

Mooncake §4.1 updates an instance's cache at placement. Only that instance counts on them: nobody can fetch what is not
computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i32, i64

from pinyon.core.block_keys import KEY_BYTES, BlockKey
from pinyon.core.compiled import compiled
from pinyon.placement.prefix_match import Holder

__all__ = ["ExpectedBlocks"]

_PLACES: Final = 1 << 18
"""Four times the keys of a thousand prompts on their way, at the default stride: 1 MB."""


class ExpectedBlocks:
    """Keys of prompts on their way, counted by instance, as prompts share them."""

    __slots__ = ("_again", "_counts", "masks", "pairs")

    def __init__(self) -> None:
        self.masks: dict[BlockKey, int] = {}
        """By key the instances that expect it, a bit for each."""
        self._again: dict[int, dict[BlockKey, int]] = {}
        """By instance, of keys that several of its prompts have: how many beside the first."""
        self._counts: vec[i32] = vec[i32]([0] * (_PLACES if compiled() else 0))
        """Keys of :attr:`masks` by a few of their bits: where there are none, nobody makes an object of a key to find
        that out. Only compiled code is faster with it."""
        self.pairs = 0
        """Of keys and those who expect them."""

    def __len__(self) -> int:
        """Different keys."""
        return len(self.masks)

    def mask_at(self, packed_keys: bytes, at: i64) -> int:
        """Who expects the key that begins at this byte; 0: nobody."""
        if compiled() and not self._counts[read_i64_le(packed_keys, at) & _PLACES - 1]:
            return 0
        return self.masks.get(packed_keys[at : at + KEY_BYTES], 0)

    def add(self, holder: Holder, keys: Sequence[BlockKey]) -> None:
        """Different ones."""
        bit, masks = holder.bit, self.masks
        if masks.keys().isdisjoint(keys):  # few prompts share what nobody holds: then nothing is done key by key
            masks.update(dict.fromkeys(keys, bit))
            self.pairs += len(keys)
            self._count(keys, 1)
            return
        again = self._again.setdefault(bit, {})
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                again[key] = again.get(key, 0) + 1
            else:
                if not mask:
                    self._count((key,), 1)
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
            self._count(keys, -1)
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
                self._count((key,), -1)
        if again is not None and not again:
            del self._again[bit]

    def _count(self, keys: Sequence[BlockKey], sign: i32) -> None:
        """They are in :attr:`masks` now, or not any more."""
        if compiled():
            counts = self._counts
            for key in keys:
                counts[read_i64_le(key, 0) & _PLACES - 1] += sign

    def of(self, holder: Holder) -> int:
        """How many keys one expects (looks at all: for tests)."""
        return sum(1 for mask in self.masks.values() if mask & holder.bit)
