"""Which block has which key, and what is known of that."""

from __future__ import annotations

from pinyon.eviction.policy import NO_TRAITS, Traits

__all__ = ["Contents"]


class Contents:
    """Of blocks ``0 .. blocks - 1``; a key is in one of them at most."""

    def __init__(self, blocks: int) -> None:
        self.block_of: dict[bytes, int] = {}
        """By key. To look at, as the next."""
        self.key_of: list[bytes | None] = [None] * blocks
        self._traits = [NO_TRAITS] * blocks
        self._offsets = [0] * blocks

    def put(self, block: int, key: bytes, traits: Traits, offset: int) -> None:
        """The block, which has none, has this key now; it is that of a request with these traits and has this place."""
        self.block_of[key] = block
        self.key_of[block] = key
        self._traits[block] = traits
        self._offsets[block] = offset

    def take(self, key: bytes) -> tuple[int, Traits, int]:
        """Its block, which has no key now, its traits and place."""
        block = self.block_of.pop(key)
        taken = block, self._traits[block], self._offsets[block]
        self.key_of[block] = None
        self._traits[block] = NO_TRAITS
        return taken

    def known_of(self, key: bytes) -> tuple[Traits, int]:
        """Its traits and place."""
        block = self.block_of[key]
        return self._traits[block], self._offsets[block]

    def faults(self) -> list[str]:
        """What is wrong. O(blocks)."""
        unlike = any(self.key_of[block] != key for key, block in self.block_of.items())
        disagree = unlike or len(self.block_of) != sum(key is not None for key in self.key_of)
        stale = any(
            traits is not NO_TRAITS and key is None for key, traits in zip(self.key_of, self._traits, strict=True)
        )
        return ["keys and blocks disagree"] * disagree + ["traits of a block without a key"] * stale
