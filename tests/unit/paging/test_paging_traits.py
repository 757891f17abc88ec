"""A policy that asks is told of every block whose it is, of what kind, and where in its prompt it stood."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pinyon.core.request import RequestClass
from pinyon.eviction import NO_TRAITS, Lru, Traits
from pinyon.eviction.policy import no_traits
from pinyon.paging import BlockPool, LeaseTable, Reservations


class Asking(Lru[int]):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Traits] = []

    def insert(self, items: Iterable[int], now_s: float = 0.0, traits_of: Callable[[int], Traits] = no_traits) -> None:
        known = list(items)
        self.told += map(traits_of, known)
        super().insert(known, now_s, traits_of)


def test_traits_of_blocks() -> None:
    policy = Asking()
    pool = BlockPool(4, policy)
    reservations = Reservations(pool, LeaseTable())
    room = reservations.reserve((), 4, 0.0)
    assert room
    keys = [bytes([number]) * 16 for number in range(4)]
    reservations.publish(room.table[1:3], keys[1:3], Traits.of(RequestClass(kind="chat", turn=2, tenant="anna")), 1)
    reservations.publish(room.table[3:], keys[3:])
    reservations.release(room.table, 1.0)
    # The deepest block goes first, so it comes first.
    assert policy.told == [NO_TRAITS, Traits("chat/2", 2, "anna"), Traits("chat/2", 1, "anna")]
    policy.told.clear()
    again = reservations.reserve((), 4, 2.0)
    assert again
    reservations.publish(again.table[:1], keys[:1])
    reservations.release(again.table, 3.0)
    assert policy.told == [NO_TRAITS], "what was known of an evicted block is told of the next one"
    pool.check_integrity()
