"""Blocks in use whose content is still being computed: requests that wait for room may count on them, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Promises:
    """The promised keys with their blocks, each until the block has its content or no holder; ids are < ``blocks``."""

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
