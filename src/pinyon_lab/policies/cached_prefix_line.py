"""Requests that wait for KV memory, in an order by what of their prompts is cached: SGLang's cache-aware policies.

What is cached is known from a radix tree of the prompts that were admitted here, those used least lately dropped: close
to what the pool holds, and kept for the sake of what it costs, which FEATHER compares (§3.4, §5.3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pinyon.batching.policy import BatchRequest
from pinyon.batching.waiting_line import AgainFirst
from pinyon.core.policies import check_bounds
from pinyon_lab.policies.radix_tree import RadixNode, RadixTree


@dataclass(frozen=True, slots=True)
class CachedPrefixSettings:
    """``tree_blocks``: keys that the radix tree holds."""

    tree_blocks: int = 65_536

    def __post_init__(self) -> None:
        check_bounds(self, tree_blocks=(1, 1 << 24))


class PrefixOrder(Protocol):
    def ordered(self, tree: RadixTree, waiting: Mapping[int, BatchRequest]) -> list[int]:
        """The numbers of those that wait, who come as they came; first whom to admit first."""
        ...


class ByCachedPrefix(AgainFirst):
    """See :class:`pinyon.batching.interface.WaitingLine`.

    The order is made anew at each time at which somebody could be admitted, as SGLang does before each of its batches.
    Nothing bounds how long somebody is passed over.
    """

    def __init__(self, order: PrefixOrder, settings: CachedPrefixSettings) -> None:
        super().__init__()
        self._order = order
        self._tree = RadixTree(settings.tree_blocks)
        self._ordered: list[int] = []
        """Of those, at this time; none: it was not asked for yet."""
        self._now_s = -1.0
        self._room = 0

    def add(self, request: BatchRequest, again: bool) -> None:
        if again:
            self._again.add(request, again)
        else:
            self._new[request.number] = request
            self._ordered.clear()

    def remove(self, number: int) -> bool:
        if self._new.pop(number, None) is None:
            return self._again.remove(number)
        if self._ordered:
            self._ordered.remove(number)
        return True

    def begin(self, now_s: float, room_blocks: int) -> None:
        if now_s != self._now_s:
            self._ordered.clear()
        self._now_s, self._room = now_s, room_blocks

    def at(self, place: int) -> BatchRequest | None:
        request = self._again.at(place)
        if request is not None:
            return request
        place -= len(self._again)
        if place >= len(self._new) or self._room < 1:
            return None
        if not self._ordered:
            self._ordered = self._order.ordered(self._tree, self._new)
        return self._new[self._ordered[place]]

    def take(self, number: int, room_blocks: int) -> None:
        self._room = room_blocks
        request = self._again.get(number)
        if request is None:
            request = self._new.pop(number)
            self._ordered.remove(number)
        else:
            self._again.take(number, room_blocks)
        self._tree.insert(request.block_keys)

    def adopt(self, request: BatchRequest) -> None:
        self._tree.insert(request.block_keys)


@dataclass(frozen=True, slots=True)
class LongestMatchSettings(CachedPrefixSettings):
    """``fallback``: where more wait, they are admitted as they came, as SGLang has it; 0: never, as FEATHER has it
    (§5.3.1)."""

    fallback: int = 128

    def __post_init__(self) -> None:
        CachedPrefixSettings.__post_init__(self)
        check_bounds(self, fallback=(0, 1_000_000))


class LongestMatch:
    """SGLang's longest prefix match: those first of whose prompts most is cached (FEATHER §3.4, experiment 9); of equal
    matches the first to come. O(W · T + W log W) for W that wait and T keys of a prompt."""

    def __init__(self, settings: LongestMatchSettings) -> None:
        self._fallback = settings.fallback

    def ordered(self, tree: RadixTree, waiting: Mapping[int, BatchRequest]) -> list[int]:
        if 0 < self._fallback < len(waiting):
            return list(waiting)
        ranks = [(-tree.match(request.block_keys).keys, number) for number, request in waiting.items()]
        return [number for _, number in sorted(ranks)]


class DfsWeight:
    """SGLang's DFS-weight: through the tree of what is cached in depth, first where most of those that wait hang
    (FEATHER §3.4, experiment 9).

    A request hangs at the node where its longest match ends; a node's weight is how many hang there and below. Of a
    node's children the heaviest comes first, of equals the one that is there for longest; behind them those that hang
    at the node itself, as they came. The whole tree is visited: O(W · T + B log B) for its B nodes.
    """

    def ordered(self, tree: RadixTree, waiting: Mapping[int, BatchRequest]) -> list[int]:
        hanging: dict[RadixNode, list[int]] = {}
        for number, request in waiting.items():
            hanging.setdefault(tree.match(request.block_keys).node, []).append(number)
        nodes = tree.nodes()
        weights = {node: len(hanging[node]) if node in hanging else 0 for node in nodes}
        for node in reversed(nodes):
            if node.parent is not None:
                weights[node.parent] += weights[node]
        # Backwards: a node, then its lightest child with all below it, the heaviest last.
        visited: list[RadixNode] = []
        stack = [tree.root]
        while stack:
            node = stack.pop()
            visited.append(node)
            stack.extend(sorted(node.children.values(), key=lambda child: -weights[child]))
        order: list[int] = []
        for node in reversed(visited):
            order.extend(hanging.get(node, ()))
        return order
