"""Room for what is decoded: before each step, every running request has the block that its next token goes into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pinyon.batching import StepScheduler

__all__ = ["Room", "make_room"]


class Room(Protocol):
    """What a service puts around :class:`pinyon.paging.Reservations` and :class:`pinyon.decisions.Admission`."""

    def grow(self, count: int) -> list[int] | None:
        """See :meth:`pinyon.paging.Reservations.grow`."""
        ...

    def give_way(self, number: int, table: list[int]) -> None:
        """It is not admitted any more, and its blocks are released; nobody who waits is admitted by it yet."""
        ...


def make_room(steps: StepScheduler, room: Room, table_of: Callable[[int], list[int]]) -> list[int]:
    """Give the running requests the blocks that they need. ``table_of`` has a request's blocks; they are added there.

    When there are none, the one that came last gives way, which may be the one that needs them: it is out of the batch
    then, its table is empty, and what it had computed stays cached as long as nobody needs the room. Returns those, in
    the order in which they gave way; whoever called has each of them wait for room again.
    """
    preempted: list[int] = []
    for number in steps.growth():
        if number in preempted:
            continue
        while (blocks := room.grow(1)) is None:
            victim = steps.victim()
            if victim is None:
                raise RuntimeError("a request needs room and nobody runs")
            steps.remove_decode(victim)
            table = table_of(victim)
            room.give_way(victim, table)
            table.clear()
            preempted.append(victim)
            if victim == number:
                break
        else:
            table_of(number).extend(blocks)
            steps.grown(number, len(blocks))
    return preempted
