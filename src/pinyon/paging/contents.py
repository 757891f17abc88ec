"""Which block has which key, and what is known of that."""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.eviction.policy import NO_TRAITS, Known, Traits

__all__ = ["Contents"]


class Contents:
    """Of blocks ``0 .. blocks - 1``; a key is in one of them at most."""

    def __init__(self, blocks: int) -> None:
        self.block_of: dict[bytes, int] = {}
        """By key. To look at, as the next."""
        self.key_of: list[bytes | None] = [None] * blocks
        self._traits = [NO_TRAITS] * blocks
        self._places = [0] * blocks
        self._after: list[bytes | None] = [None] * blocks

    def put(self, block: int, key: bytes, traits: Traits, place: int, after: bytes | None) -> None:
        """The block, which has none, has this key now, of which this is :class:`Known`."""
        self.block_of[key] = block
        self.key_of[block] = key
        self._traits[block] = traits
        self._places[block] = place
        self._after[block] = after

    def used(self, blocks: Iterable[int], traits: Traits) -> None:
        """By a request with these traits."""
        for block in blocks:
            self._traits[block] = traits

    def take(self, key: bytes) -> tuple[int, Known]:
        """Its block, which has no key now."""
        known = self.known_of(key)
        block = self.block_of.pop(key)
        self.key_of[block] = self._after[block] = None
        self._traits[block] = NO_TRAITS
        return block, known

    def known_of(self, key: bytes) -> Known:
        block = self.block_of[key]
        return Known(self._traits[block], self._places[block], self._after[block])

    def faults(self) -> list[str]:
        """What is wrong. O(blocks)."""
        unlike = any(self.key_of[block] != key for key, block in self.block_of.items())
        disagree = unlike or len(self.block_of) != sum(key is not None for key in self.key_of)
        stale = any(
            traits is not NO_TRAITS and key is None for key, traits in zip(self.key_of, self._traits, strict=True)
        )
        return ["keys and blocks disagree"] * disagree + ["traits of a block without a key"] * stale
