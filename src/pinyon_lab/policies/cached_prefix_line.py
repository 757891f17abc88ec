"""Requests that wait for KV memory, ordered by the cached part of their prompts: SGLang's cache-aware policies.

The cached part is found in a radix tree of the prompts admitted here, from which the least recently used ones are
dropped. The tree is close to the pool's content. It exists because its cost matters: FEATHER compares this (§3.4,
§5.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pinyon.batching.policy import BatchRequest
from pinyon.batching.waiting_line import AgainFirst
from pinyon.core.policies import check_bounds
from pinyon_lab.policies.radix_tree import RadixNode, RadixTree


@dataclass(frozen=True, slots=True)
class CachedPrefixSettings:
    """The settings of both policies; ``tree_blocks`` is the number of keys that the radix tree holds."""

    tree_blocks: int = 65_536

    def __post_init__(self) -> None:
        check_bounds(self, tree_blocks=(1, 1 << 24))


PrefixOrder = Callable[[RadixTree, Mapping[int, BatchRequest]], list[int]]
"""A function that gets the waiting requests in order of arrival, and returns their numbers in order of admission."""


class ByCachedPrefix(AgainFirst):
    """A waiting line by cached prefix, see :class:`pinyon.batching.interface.WaitingLine`.

    The order is computed anew whenever a request could be admitted, as SGLang does before each of its batches. Nothing
    bounds how long a request is passed over."""

    def __init__(self, order: PrefixOrder, settings: CachedPrefixSettings) -> None:
        super().__init__()
        self._order = order
        self._tree = RadixTree(settings.tree_blocks)
        self._ordered: list[int] = []
        """The new requests in their order at this time; empty: not computed yet."""
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
            self._ordered = self._order(self._tree, self._new)
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
    """The settings of :func:`longest_match`.

    If more than ``fallback`` requests wait, they are admitted in order of arrival, as in SGLang; 0: they never are, as
    in FEATHER (§5.3.1)."""

    fallback: int = 128

    def __post_init__(self) -> None:
        CachedPrefixSettings.__post_init__(self)
        check_bounds(self, fallback=(0, 1_000_000))


def longest_match(tree: RadixTree, waiting: Mapping[int, BatchRequest], fallback: int) -> list[int]:
    """Returns the requests by SGLang's longest prefix match: the longest cached one first (FEATHER §3.4, experiment 9).

    Ties go to the first to arrive. O(W · T + W log W) for W waiting requests and T keys of a prompt."""
    if 0 < fallback < len(waiting):
        return list(waiting)
    ranks = [(-tree.match(request.block_keys).keys, number) for number, request in waiting.items()]
    return [number for _, number in sorted(ranks)]


def dfs_weight(tree: RadixTree, waiting: Mapping[int, BatchRequest]) -> list[int]:
    """Returns the requests by SGLang's DFS-weight: the heaviest branches first (FEATHER §3.4, experiment 9).

    The cached tree is walked depth first. A request belongs to the node where its longest match ends; a node's weight
    is the number of requests there and below. Of a node's children, the heaviest comes first; ties go to the oldest.
    After them come the requests at the node itself, in order of arrival. The whole tree is visited: O(W · T + B log B)
    for its B nodes."""
    hanging: dict[RadixNode, list[int]] = {}
    for number, request in waiting.items():
        hanging.setdefault(tree.match(request.block_keys).node, []).append(number)
    nodes = tree.nodes()
    weights = {node: len(hanging.get(node, ())) for node in nodes}
    for node in reversed(nodes):
        if node.parent is not None:
            weights[node.parent] += weights[node]
    # The walk goes backwards: a node, then its lightest child with everything below it, and the heaviest child last.
    visited: list[RadixNode] = []
    stack = [tree.root]
    while stack:
        node = stack.pop()
        visited.append(node)
        stack.extend(sorted(node.children.values(), key=lambda child: -weights[child]))
    return [number for node in reversed(visited) for number in hanging.get(node, ())]
