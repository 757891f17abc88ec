"""The key of each block, and what the eviction policy is told about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pinyon.eviction.interface import NO_TRAITS, Known, Traits


class Contents:
    """The keys of blocks ``0 .. blocks - 1``; a key is in at most one block."""

    def __init__(self, blocks: int) -> None:
        self.block_of: dict[bytes, int] = {}
        """The block of each key; callers only read this and ``key_of``."""
        self.key_of: list[bytes | None] = [None] * blocks
        self._traits = [NO_TRAITS] * blocks
        self._places = [0] * blocks
        self._after: list[bytes | None] = [None] * blocks

    def put(self, block: int, key: bytes, traits: Traits, place: int, after: bytes | None) -> None:
        """Gives an unkeyed block this key; the other arguments are the fields of :class:`Known`."""
        self.block_of[key] = block
        self.key_of[block] = key
        self._traits[block] = traits
        self._places[block] = place
        self._after[block] = after

    def put_all(
        self, blocks: Sequence[int], keys: Sequence[bytes], traits: Traits, place: int, after: bytes | None
    ) -> None:
        """Gives keys to several unkeyed blocks that follow each other in a prompt, the first at ``place``."""
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
        """Records that a request with these traits uses the blocks."""
        all_traits = self._traits
        for block in blocks:
            all_traits[block] = traits

    def take(self, key: bytes) -> tuple[int, Known]:
        """Removes a key and returns its block, which has no key now, and what was known of the key."""
        known = self.known_of(key)
        block = self.block_of.pop(key)
        self.key_of[block] = self._after[block] = None
        self._traits[block] = NO_TRAITS
        return block, known

    def take_all(self, keys: Sequence[bytes]) -> list[int]:
        """Removes these keys and returns their blocks, which have no keys now."""
        block_of, key_of, afters, traits = self.block_of, self.key_of, self._after, self._traits
        blocks = [block_of.pop(key) for key in keys]
        for block in blocks:
            key_of[block] = afters[block] = None
            traits[block] = NO_TRAITS
        return blocks

    def known_of(self, key: bytes) -> Known:
        block = self.block_of[key]
        return Known(self._traits[block], self._places[block], self._after[block])
