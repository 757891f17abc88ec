"""A batch as large as memory and a limit of the time between tokens allow: dynamic batching, a baseline of FEATHER
(§5.1.3, which says of it that it "adjusts batch sizes based on runtime memory utilization and latency constraints").

How is this file's own. **Latency**: the mean length of each so many steps is held against the target; where it is more,
as many requests are admitted as the step time would allow if it were in proportion (it is less: weights are read
anyway, so that is careful), and where it is clearly less and the limit was reached, an eighth more. Nobody is sent away
for it. **Memory**: those that run grow by a block sooner or later, so a block for each is left to them when others are
admitted: without it those that came last give way soon after, and are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pinyon.batching.policy import BatchRequest, StepSeen
from pinyon_lab.policies.bounded import Bounded

STEPS: Final = 16
"""That are looked at together: one alone may have a prompt in it."""
REACHED: Final = 0.9
"""Of the limit, or of the target: more is close to it."""
CUT_MAX: Final = 0.5
GROWTH: Final = 8
BATCH_MAX: Final = 1 << 20
"""As good as no limit."""


@dataclass(frozen=True, slots=True)
class DynamicBatchSettings:
    """``tbt_s``: a step takes no longer, on the average of some."""

    tbt_s: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.tbt_s <= 60:
            raise ValueError("tbt_s must be more than 0 and at most 60")


class DynamicBatch:
    """See :class:`pinyon_lab.policies.bounded.AdmissionBound`."""

    def __init__(self, settings: DynamicBatchSettings) -> None:
        self._tbt_s = settings.tbt_s
        self._running: dict[int, bool] = {}
        """Whether it is decoded."""
        self._decoded = 0
        """Of those that are."""
        self.limit = BATCH_MAX
        """Requests that are decoded at once."""
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        """Since the limit was last looked at."""

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
