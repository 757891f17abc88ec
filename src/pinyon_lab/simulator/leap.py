"""Equal steps of an engine that are taken as one, until something comes up."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt


@dataclass(slots=True)
class Leap:
    began_s: float
    """When the first step did, on the virtual clock."""
    step_s: float
    """Of the first one."""
    growth_s: float = 0.0
    """So much longer is each than the one before."""
    stall_s: float = 0.0
    """For which the engine waits for its scheduler before each; that of the first one is over when it begins."""
    count: int = 1

    def lasts(self, steps: int) -> float:
        """So many steps, and the waits between them."""
        return steps * self.step_s + (steps - 1) * self.stall_s + self.growth_s * (steps * (steps - 1) / 2)

    @property
    def end_s(self) -> float:
        return self.began_s + self.lasts(self.count)

    def shorten(self, now_s: float) -> bool:
        """To end with the present step, or with the one that the engine waits for; False: it does so anyway."""
        if self.count <= 1:
            return False
        past_s, growth_s = now_s - self.began_s, self.growth_s
        each_s, until_s = self.step_s + self.stall_s, past_s + self.stall_s
        if growth_s > 0:
            half = each_s - growth_s / 2
            steps = (-half + sqrt(half * half + 2 * growth_s * max(0.0, until_s))) / growth_s
        else:
            steps = until_s / each_s if each_s else 0.0
        count = min(self.count, max(1, ceil(steps)))
        while count < self.count and self.lasts(count) < past_s:  # of rounding
            count += 1
        if count == self.count:
            return False
        self.count = count
        return True
