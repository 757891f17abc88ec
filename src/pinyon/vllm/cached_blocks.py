"""The keys of the blocks in vLLM's prefix cache, as the conductor is told of them.

vLLM gives a block new content only when it hands it to a request. So the scheduler's side follows what is handed out,
and what each step completes, and looks into the pool for blocks that vLLM forgets in other ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pinyon.core.block_keys import BlockKey
from pinyon.paging.key_changes import KeyChanges

LOOK_BLOCKS = 64
"""The number of blocks that are looked at in one step."""


class CachedBlocks:
    """The blocks with content, and the net changes of the set of their keys."""

    def __init__(self) -> None:
        self._key_of: dict[int, BlockKey] = {}
        self._holders: dict[BlockKey, int] = {}
        """The number of blocks with each key."""
        self.changes = KeyChanges()
        self._unseen: list[int] = []
        """The blocks that this round of looking has not seen yet."""

    def __len__(self) -> int:
        return len(self._key_of)

    def keys(self) -> list[BlockKey]:
        return list(self._holders)

    def holds(self, key: BlockKey) -> bool:
        return key in self._holders

    def key_of(self, block: int) -> BlockKey | None:
        return self._key_of.get(block)

    def fill(self, block: int, key: BlockKey) -> None:
        """Notes that the block has this content."""
        if self._key_of.get(block) == key:
            return
        self.empty(block)
        self._key_of[block] = key
        count = self._holders.get(key, 0)
        self._holders[key] = count + 1
        if not count:
            self.changes.add(key)

    def empty(self, block: int) -> None:
        """Notes that the block's content is gone."""
        key = self._key_of.pop(block, None)
        if key is None:
            return
        count = self._holders.pop(key) - 1
        if count:
            self._holders[key] = count
        else:
            self.changes.remove(key)

    def empty_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.empty(block)

    def clear(self) -> None:
        for block in list(self._key_of):
            self.empty(block)

    def look(self, pool: Any, every: bool = False) -> None:
        """Looks for blocks that vLLM's pool has forgotten: at some of them, or at ``every`` one."""
        if every or not self._unseen:
            self._unseen = list(self._key_of)
        blocks = pool.blocks
        for _ in range(len(self._unseen) if every else min(LOOK_BLOCKS, len(self._unseen))):
            block = self._unseen.pop()
            if blocks[block].block_hash is None and not blocks[block].ref_cnt:
                self.empty(block)
