"""What deciding takes of an engine's time, where a simulation is to count it."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["NO_COST", "SchedulingCost"]

COST_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    """An engine waits for so long before each step. Raises ``ValueError`` for what is not from 0 to 60 s."""

    step_s: float = 0.0
    waiting_s: float = 0.0
    """More for each request that waits for KV memory, or for a place among those that are decoded, then."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= COST_S_MAX:
                raise ValueError(f"{field.name} of scheduling must be from 0 to {COST_S_MAX:g} seconds")

    def of(self, waiting: int) -> float:
        """Of one step, in seconds."""
        return self.step_s + self.waiting_s * waiting


NO_COST = SchedulingCost()
