"""The blocks that vLLM will drop next: they are offered to the store before their content is lost.

The store copies what it does not have, or has evicted meanwhile, and learns its type, turn and session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from pinyon.core.request import RequestClass

DROPS_MAX = 16
"""The number of blocks that are offered at a time."""

Drop = tuple[int, bytes, int]
"""The place of a block in its prompt, its key, and vLLM's number of it."""


class Drops:
    """The heads of vLLM's queue of free blocks, and whose content each block has. Owned by EngineCore's thread."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._whose: dict[int, tuple[int, RequestClass]] = {}
        """The place of each block in the last prompt that had it, and whose that was; not after it was offered."""
        self.jobs: set[int] = set()
        """The save jobs of such blocks; nothing more is offered until they are done."""

    def bind(self, pool: Any) -> bool:
        """Takes vLLM's pool; returns False if this version's queue is not understood, and nothing is offered."""
        queue = getattr(pool, "free_block_queue", None)
        if not all(hasattr(queue, name) for name in ("fake_free_list_head", "prepend_n")):
            return False
        self._pool = pool
        return True

    def offers(self, running: int) -> bool:
        """Returns whether blocks may be pinned for it: not if one of the ``running`` requests could have to wait."""
        if self._pool is None or self.jobs:
            return False
        free: int = self._pool.get_num_free_blocks()
        return free > DROPS_MAX + running

    def used(self, first: int, blocks: Iterable[int], request_class: RequestClass) -> None:
        """Notes whose content blocks have, from place ``first`` of a prompt on."""
        for place, block in enumerate(blocks, first):
            self._whose[block] = place, request_class

    def given(self, blocks: Iterable[int]) -> None:
        """Notes that blocks were handed out, to be written to."""
        for block in blocks:
            self._whose.pop(block, None)

    def clear(self) -> None:
        self._whose.clear()

    def next(self, key_of: Callable[[int], bytes | None]) -> dict[RequestClass, list[Drop]]:
        """Returns the blocks that vLLM hands out next and that were not offered yet, by whose they are."""
        found: dict[RequestClass, list[Drop]] = {}
        for block in self._head():
            key, whose = key_of(block.block_id), self._whose.pop(block.block_id, None)
            if key is not None and whose is not None:
                found.setdefault(whose[1], []).append((whose[0], key, block.block_id))
        return found

    def saved(self, job_id: int, blocks: Sequence[Any]) -> None:
        """Frees the blocks of a job that is done: they are next again, behind those that were offered before. Those
        that were used meanwhile are not."""
        self.jobs.discard(job_id)
        self._pool.free_blocks([block for block in blocks if block.block_id in self._whose])
        first = list(takewhile(lambda block: block.block_id not in self._whose, self._head()))
        self._pool.touch(first)
        others = first + [block for block in blocks if block.block_id not in self._whose]
        for block in others:
            block.ref_cnt -= 1
        self._pool.free_block_queue.prepend_n([block for block in others if not block.ref_cnt])

    def _head(self) -> Iterator[Any]:
        """Yields the blocks that vLLM hands out next, up to one that holds nothing."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(DROPS_MAX):
            if block is None or block.block_hash is None:
                return
            yield block
            block = block.next_free_block
