"""Which store node an object goes to: rendezvous (highest random weight) hashing. Pure.

Every caller ranks the nodes alike without talking, and when a node comes or goes only the objects move that it wins or
had (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

__all__ = ["rank"]


def rank(key: bytes, nodes: Iterable[str]) -> list[str]:
    """The nodes from best to worst for this key. The order of ``nodes`` does not matter."""
    return sorted(set(nodes), key=lambda node: (xxh3_64_intdigest(key + node.encode("utf-8")), node), reverse=True)
