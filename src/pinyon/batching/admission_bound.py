"""What a policy that admits as others come may hold back of slots and room."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pinyon.batching.policy import BatchRequest, StepSeen

__all__ = ["AdmissionBound", "Bounded"]


class Bounded(NamedTuple):
    """What those that wait may take; nothing where it is less than one."""

    slots: int
    room_blocks: int


class AdmissionBound(Protocol):
    """Where nobody is admitted, all of the room must be left: else nobody would ever be."""

    def within(self, slots: int, room_blocks: int) -> Bounded:
        """Of so much, as of now."""
        ...

    def admitted(self, request: BatchRequest) -> None: ...

    def ended(self, number: int) -> None:
        """One that was admitted is not any more."""
        ...

    def observe(self, step: StepSeen) -> None:
        """What a step has brought."""
        ...
