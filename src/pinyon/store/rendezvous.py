"""The choice of a store node for an object: weighted rendezvous (highest random weight) hashing. Pure.

Every caller ranks the nodes alike without talking to others. When a node comes, goes or grows, only the objects move
that it wins or had (Thaler and Ravishankar, 1998; with weights: Schindelhauer and Schomaker, 2005)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from xxhash import xxh3_64_intdigest


def rank(key: bytes, weights: Mapping[str, float]) -> list[str]:
    """Returns the nodes from best to worst for this key.

    A node wins a share of keys that is its share of the ``weights``, which are positive; their order does not
    matter."""

    def score(node: str) -> tuple[float, str]:
        # 52 bits and a half make a double between 0 and 1, so that the logarithm is never 0.
        draw = ((xxh3_64_intdigest(key + node.encode("utf-8")) >> 12) + 0.5) / (1 << 52)
        return -weights[node] / math.log(draw), node

    return sorted(weights, key=score, reverse=True)
