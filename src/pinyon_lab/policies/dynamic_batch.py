"""A batch as large as memory and a limit of the time between tokens allow: dynamic batching, a baseline of FEATHER.

FEATHER (§5.1.3) says that it "adjusts batch sizes based on runtime memory utilization and latency constraints". The way
is this file's own:

- **Latency**: the mean length of each :data:`STEPS` steps is held against the target. Where it is more, as many
  requests are admitted as the step time would allow if it were in proportion. It grows less than that, as weights are
  read anyway, so this is careful. Where it is clearly less and the limit was reached, an eighth more requests are
  admitted. No running request is stopped for it.
- **Memory**: running requests grow by a block sooner or later, so a block for each stays free when others are admitted.
  Without it those that came last would give way soon after, and be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pinyon.batching.policy import BatchRequest, StepSeen
from pinyon_lab.policies.bounded import Bounded

STEPS: Final = 16
"""The number of steps that are averaged: a single one may have a prompt in it."""
REACHED: Final = 0.9
"""The share of the limit, or of the target, from which on it counts as nearly reached."""
CUT_MAX: Final = 0.5
GROWTH: Final = 8
BATCH_MAX: Final = 1 << 20
"""A value as good as no limit."""


@dataclass(frozen=True, slots=True)
class DynamicBatchSettings:
    """The settings of ``dynamic``; the mean step time stays at or below ``tbt_s`` seconds."""

    tbt_s: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.tbt_s <= 60:
            raise ValueError("tbt_s must be more than 0 and at most 60")


class DynamicBatch:
    """A bound on the batch size, see :class:`pinyon_lab.policies.bounded.AdmissionBound`."""

    def __init__(self, settings: DynamicBatchSettings) -> None:
        self._tbt_s = settings.tbt_s
        self._running: dict[int, bool] = {}
        """The admitted requests, with True if they are decoded here."""
        self._decoded = 0
        """The number of those that are decoded here."""
        self.limit = BATCH_MAX
        """The limit of requests that are decoded at once."""
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        """The sums since the limit was last adjusted."""

    def within(self, slots: int, room_blocks: int) -> Bounded:
        return Bounded(min(slots, self.limit - self._decoded), room_blocks - self._decoded)

    def admitted(self, request: BatchRequest) -> None:
        self._running[request.number] = request.decodes
        self._decoded += request.decodes

    def ended(self, number: int) -> None:
        self._decoded -= self._running.pop(number)

    def observe(self, step: StepSeen) -> None:
        if not step.decoded:
            return
        self._steps += step.steps
        self._tokens += step.decoded
        self._seconds += step.seconds
        if self._steps < STEPS:
            return
        batch, tbt_s = self._tokens / self._steps, self._seconds / self._steps
        if tbt_s > self._tbt_s:
            self.limit = max(1, int(batch * max(CUT_MAX, self._tbt_s / tbt_s)))
        elif tbt_s < REACHED * self._tbt_s and batch >= REACHED * self.limit:
            self.limit = min(BATCH_MAX, self.limit + max(1, self.limit // GROWTH))
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
