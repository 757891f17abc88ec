"""What an eviction policy is asked, whoever asks.

A policy knows only what may go: the caller inserts an item when its last reader left and removes it when it is read
again. Clock values are arguments. ``Traits`` is the seam for policies that look at more than order: the one of
"KVCache cache in the wild" §4.2 ranks by the reuse probability of a request category and, inside it, by offset.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from pinyon.core.request import RequestClass

__all__ = ["NO_TRAITS", "EvictionPolicy", "Traits", "no_traits"]

Item = TypeVar("Item", bound=Hashable)


class Traits(NamedTuple):
    """What is known of an item besides its order."""

    category: str = ""
    """Request category, such as type and turn; empty = unknown."""
    offset: int = 0
    """Position of the block in its prompt, in blocks."""
    tenant: str = ""
    """Whose it is; empty = unknown."""

    @classmethod
    def of(cls, request: RequestClass, offset: int = 0) -> Traits:
        """Those of a block that was computed for such a request."""
        return cls(request.category, offset, request.tenant)


NO_TRAITS = Traits()


def no_traits(_: Hashable) -> Traits:
    """Nothing is known of any item."""
    return NO_TRAITS


class EvictionPolicy(Protocol[Item]):
    """Chooses what goes among the items inserted. All methods are cheap; items are unique."""

    def insert(
        self, items: Iterable[Item], now_s: float = 0.0, traits_of: Callable[[Item], Traits] = no_traits
    ) -> None:
        """These became evictable now, in this order; none of them is in the policy.

        ``traits_of`` may be asked for their traits until this returns: most policies do not want to know.
        """
        ...

    def touch(self, item: Item, now_s: float = 0.0) -> None:
        """It was used, but stays evictable. Raises ``KeyError`` if it is not in the policy."""
        ...

    def remove(self, items: Iterable[Item]) -> None:
        """These are not evictable any more. Raises ``KeyError`` if one is not in the policy."""
        ...

    def victim(self, now_s: float = 0.0) -> Item | None:
        """The item that should go next, taken out of the policy; ``None`` when there is nothing."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, item: object) -> bool: ...
