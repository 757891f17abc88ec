"""The prefixes that an instance's decoded requests have in common: FEATHER's tip and its depth, for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pinyon.batching.chunked_hash_tree import ChunkedHashTree
from pinyon.batching.rounds import Formed
from pinyon.core.block_keys import SHARED_PREFIXES_MAX, BlockKey, SharedPrefix

LEVEL_BLOCKS: Final = 4
"""Full blocks of a prompt that are one level: sharing is known in whole levels."""


class DecodedPrefixes:
    """The decoded requests by their prompts' full blocks, for any batching policy. Indexed on demand."""

    def __init__(self) -> None:
        self._tree: ChunkedHashTree[int] = ChunkedHashTree(1)
        """Tree in which all requests are active."""
        self._new: dict[int, Sequence[BlockKey]] = {}
        """Paths of requests that are not in the tree yet."""
        self._levels = 0
        """Levels of requests in the tree."""
        self._shared: tuple[SharedPrefix, ...] | None = ()
        """The last answer; None after requests came or went."""

    def __len__(self) -> int:
        return self._tree.active + len(self._new)

    def add(self, number: int, block_keys: Sequence[BlockKey]) -> None:
        """Adds a request that is decoded here from now on, or later. Raises ``ValueError`` if it is known."""
        if number in self._new or number in self._tree:
            raise ValueError(f"request {number} is here already")
        self._new[number] = block_keys[LEVEL_BLOCKS - 1 :: LEVEL_BLOCKS]

    def remove(self, number: int) -> None:
        """Removes a request that has ended or gave way; does nothing if it is not known."""
        if self._new.pop(number, None) is None and number in self._tree:
            self._levels -= self._tree.levels(number)
            self._tree.finish(number)
            self._shared = None

    def shared(self) -> tuple[SharedPrefix, ...]:
        """Returns at most ``SHARED_PREFIXES_MAX`` prefixes: those whose shared reading saves most.

        The object stays the same until requests come or go. O(keys of new requests), and O(nodes) if there are any."""
        self._look()
        if self._shared is None:
            self._shared = tuple(
                [
                    SharedPrefix(group.tip, group.depth * LEVEL_BLOCKS, group.requests)
                    for group in self._tree.groups(SHARED_PREFIXES_MAX)
                    if isinstance(group.tip, bytes)
                ]
            )
        return self._shared

    def formed(self) -> Formed:
        """Returns the figures of a batch that holds all requests."""
        self._look()
        count, depth = self._tree.active, self._tree.tip_depth
        homogeneity = depth * count / self._levels if self._levels else 0.0
        return Formed(requests=count, shared_blocks=depth * LEVEL_BLOCKS, homogeneity=homogeneity)

    def _look(self) -> None:
        if not self._new:
            return
        for number, path in self._new.items():
            self._tree.insert_hashes(number, path)
            self._tree.add_to_batch(number)
            self._levels += len(path)
        self._new.clear()
        self._shared = None
