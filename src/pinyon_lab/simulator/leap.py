"""A series of equal engine steps that are simulated as one, and sums over steps that decode."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt


@dataclass(slots=True)
class Leap:
    """A series of equal steps that are simulated as one, until an event cuts it short."""

    began_s: float
    """The start of the first step on the virtual clock."""
    step_s: float
    """The duration of the first step."""
    growth_s: float = 0.0
    """The time by which each step is longer than the one before."""
    stall_s: float = 0.0
    """The time for which the engine waits for its scheduler before each step; the first step begins after it."""
    count: int = 1

    def lasts(self, steps: int) -> float:
        """Returns the duration of so many steps and of the waits between them."""
        return steps * self.step_s + (steps - 1) * self.stall_s + self.growth_s * (steps * (steps - 1) / 2)

    @property
    def end_s(self) -> float:
        return self.began_s + self.lasts(self.count)

    def shorten(self, now_s: float) -> bool:
        """Ends the leap with the present step, or with the step that the engine waits for. False: it does so anyway."""
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
        while count < self.count and self.lasts(count) < past_s:  # against rounding errors
            count += 1
        if count == self.count:
            return False
        self.count = count
        return True


@dataclass(slots=True)
class DecodeSums:
    steps: int = 0
    """The number of steps that decoded any request."""
    tokens: int = 0
    seconds: float = 0.0
    """The time of those steps, less the time of prefill in the same steps."""
    kv_tokens: float = 0.0
    """The tokens whose KV was read, as the engine's profile counts them where a whole batch shares some."""

    def add(self, steps: int, requests: int, seconds: float, kv_tokens: float) -> None:
        """Adds so many steps, each of which decoded one token for each of ``requests`` requests."""
        self.steps += steps
        self.tokens += steps * requests
        self.seconds += seconds
        self.kv_tokens += kv_tokens
