"""The key of each block, now or once its holders have computed it, and what the eviction policy is told about it."""

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


class Promises:
    """The keys of used blocks whose content is still being computed: requests that wait for room may count on them.

    A promise holds until the block has its content or no holder. The blocks are ``0 .. blocks - 1``."""

    def __init__(self, blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * blocks

    def __len__(self) -> int:
        return len(self._block_of)

    def run(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the leading run of ``keys`` that is promised."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Adds promises; keys that are promised already keep their blocks."""
        block_of, key_of = self._block_of, self._key_of
        for key, block in zip(keys, blocks, strict=True):
            if key not in block_of:
                block_of[key] = block
                key_of[block] = key

    def end(self, block: int) -> None:
        """Ends the promise of a block, if any: the block has its content, or nobody uses it."""
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            del self._block_of[key]

    def end_all(self, blocks: Iterable[int]) -> None:
        if self._block_of:
            for block in blocks:
                self.end(block)
