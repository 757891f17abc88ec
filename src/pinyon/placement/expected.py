"""Blocks that instances do not hold yet but will: those of the prompts that were placed there.

Mooncake §4.1 updates an instance's cache at placement. Only that instance counts on them: nobody can fetch what is not
computed.
"""

from __future__ import annotations

from collections import deque

from librt.vecs import vec
from mypy_extensions import i64

from pinyon.core.block_keys import KEY_BYTES, BlockKey, unpack_keys
from pinyon.placement.prefix_match import Holder

__all__ = ["ExpectedBlocks", "ExpectedInDict"]


class ExpectedBlocks:
    """Keys of prompts on their way, counted by instance, as prompts share them. Keys are packed."""

    pairs: int
    """Of keys and those who expect them."""

    def __len__(self) -> int:
        """Different keys."""
        raise NotImplementedError

    def has_some(self, prints: vec[i64], count: i64) -> bool:
        """Whether somebody may expect one of the keys with the first ``count`` of these fingerprints."""
        return True

    def mask_at(self, packed_keys: bytes, at: i64, print_: i64) -> int:
        """Who expects the key that begins at this byte and has this fingerprint, a bit for each; 0: nobody."""
        raise NotImplementedError

    def add(self, holder: Holder, packed_keys: bytes) -> None:
        """One of its prompts has these."""
        raise NotImplementedError

    def remove(self, holder: Holder, packed_keys: bytes) -> None:
        """What was added."""
        raise NotImplementedError

    def of(self, holder: Holder) -> int:
        """How many keys one expects (looks at all: for tests)."""
        raise NotImplementedError


class ExpectedInDict(ExpectedBlocks):
    """As objects: operations on many at once are fast in Python."""

    def __init__(self) -> None:
        self.masks: dict[BlockKey, int] = {}
        """By key the instances that expect it, a bit for each."""
        self._again: dict[int, dict[BlockKey, int]] = {}
        """By instance, of keys that several of its prompts have: how many beside the first."""
        self.pairs = 0

    def __len__(self) -> int:
        return len(self.masks)

    def mask_at(self, packed_keys: bytes, at: i64, print_: i64) -> int:
        return self.masks.get(packed_keys[at : at + KEY_BYTES], 0)

    def add(self, holder: Holder, packed_keys: bytes) -> None:
        keys = _different(packed_keys)
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

    def remove(self, holder: Holder, packed_keys: bytes) -> None:
        keys = _different(packed_keys)
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
        return sum(1 for mask in self.masks.values() if mask & holder.bit)


def _different(packed_keys: bytes) -> list[BlockKey]:
    """A client may name one twice."""
    return list(dict.fromkeys(unpack_keys(packed_keys)))
