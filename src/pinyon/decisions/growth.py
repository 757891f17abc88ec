"""Room for decoding: before each step, every running request gets the block that its next token goes into.

When there is no room, the requests that came last give way: their blocks are released, and they wait again. They also
give way to a waiting request that came before them, if their blocks are enough for it. The first always gets on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pinyon.batching import StepScheduler
from pinyon.decisions.admission import Admission


class Room(Protocol):
    """The methods of a service around :class:`pinyon.paging.Reservations` and :class:`pinyon.decisions.Admission`."""

    def grow(self, number: int, count: int) -> list[int] | None:
        """Returns further blocks: see :meth:`pinyon.decisions.Admission.grow`."""

    def give_way(self, number: int, table: list[int]) -> None:
        """Ends the request's admission and releases its blocks, without admitting a waiting request yet."""


def make_room(
    steps: StepScheduler, admission: Admission, room: Room, table_of: Callable[[int], list[int]]
) -> list[int]:
    """Gives the running requests the blocks that they need; adds these to the lists that ``table_of`` returns.

    Returns the requests that gave way, in this order: they are out of the batch, and their tables are empty. What they
    had computed stays cached as long as nobody needs the room. The caller must queue each of them for room again."""
    preempted: list[int] = []

    def preempt(number: int) -> None:
        steps.remove_decode(number)
        table = table_of(number)
        room.give_way(number, table)
        table.clear()
        preempted.append(number)

    claimant = admission.claimant()
    if claimant is not None:
        younger = [number for number in steps.decoded() if number > claimant]
        if admission.lacks(claimant) <= admission.held(younger):
            for number in sorted(younger, reverse=True):
                if not admission.lacks(claimant):
                    break
                preempt(number)
    for number in steps.growth():
        if number in preempted:
            continue
        while (blocks := room.grow(number, 1)) is None:
            victim = max(steps.decoded())
            preempt(victim)
            if victim == number:
                break
        else:
            table_of(number).extend(blocks)
            steps.grown(number, len(blocks))
    return preempted
