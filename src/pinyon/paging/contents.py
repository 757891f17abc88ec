"""Which block has which key, and what is known of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pinyon.eviction.policy import NO_TRAITS, Known, Traits


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

    def put_all(
        self, blocks: Sequence[int], keys: Sequence[bytes], traits: Traits, place: int, after: bytes | None
    ) -> None:
        """The same of several that follow each other in a prompt, the first one at this place."""
        block_of, key_of = self.block_of, self.key_of
        all_traits, places, afters = self._traits, self._places, self._after
        for block, key in zip(blocks, keys, strict=True):
            block_of[key] = block
            key_of[block] = key
            all_traits[block] = traits
            places[block] = place
            afters[block] = after
            place += 1
            after = key

    def used(self, blocks: Iterable[int], traits: Traits) -> None:
        """By a request with these traits."""
        all_traits = self._traits
        for block in blocks:
            all_traits[block] = traits

    def take(self, key: bytes) -> tuple[int, Known]:
        """Its block, which has no key now."""
        known = self.known_of(key)
        block = self.block_of.pop(key)
        self.key_of[block] = self._after[block] = None
        self._traits[block] = NO_TRAITS
        return block, known

    def take_all(self, keys: Sequence[bytes]) -> list[int]:
        """Their blocks, which have no keys now."""
        block_of, key_of, afters, traits = self.block_of, self.key_of, self._after, self._traits
        blocks = [block_of.pop(key) for key in keys]
        for block in blocks:
            key_of[block] = afters[block] = None
            traits[block] = NO_TRAITS
        return blocks

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
