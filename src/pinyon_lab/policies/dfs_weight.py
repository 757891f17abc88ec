"""SGLang's DFS-weight: through the tree of what is cached in depth, first where most of those that wait hang (FEATHER
§3.4, experiment 9)."""

from __future__ import annotations

from collections.abc import Mapping

from pinyon.batching.policy import BatchRequest
from pinyon_lab.policies.radix_tree import RadixNode, RadixTree

__all__ = ["DfsWeight"]


class DfsWeight:
    """See :class:`pinyon_lab.policies.cached_prefix_line.PrefixOrder`.

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
