"""Room for what is decoded: before each step, every running request has the block that its next token goes into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from pinyon.batching import StepScheduler

__all__ = ["Room", "make_room"]


class Room(Protocol):
    """:class:`pinyon.paging.Reservations`, or what a service puts around it."""

    def grow(self, count: int, now_s: float) -> list[int] | None: ...

    def preempt(self, blocks: Iterable[int], now_s: float) -> None: ...


def make_room(steps: StepScheduler, room: Room, table_of: Callable[[int], list[int]], now_s: float) -> list[int]:
    """Give the running requests the blocks that they need. ``table_of`` has a request's blocks; they are added there.

    When there are none, the one that was admitted last gives way, which may be the one that needs it: it is out of the
    batch then, its table is empty, and what it had computed stays cached as long as nobody needs the room. Returns
    those, in the order in which they gave way; whoever called asks for room for each of them again.
    """
    preempted: list[int] = []
    for number in steps.growth():
        if number in preempted:
            continue
        while (blocks := room.grow(1, now_s)) is None:
            victim = steps.victim()
            if victim is None:
                raise RuntimeError("a request needs room and nobody runs")
            steps.remove_decode(victim)
            table = table_of(victim)
            room.preempt(table, now_s)
            table.clear()
            preempted.append(victim)
            if victim == number:
                break
        else:
            table_of(number).extend(blocks)
            steps.grown(number, len(blocks))
    return preempted
