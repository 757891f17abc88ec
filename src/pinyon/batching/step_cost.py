"""An estimate of the time of a step with a chunk of a prompt, and the chunk size that keeps a step within a limit.

Decoded requests get their next tokens when the step is over, so a chunk's time adds to the time between tokens.
Sarathi-Serve limits the chunk's number of tokens. But attention makes a token cost more the deeper its chunk is.
Nothing is known of the engine beforehand; the estimate learns from past steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from pinyon.batching.policy import StepSeen

PROMPT_SHARE: Final = 0.25
"""The least time for prompts, as a share of decoding's. Without it, a batch that fills the limit all but stops them."""
OTHER_WEIGHT: Final = 0.25
"""Weight of the last step without prompts: the requests it decodes change slowly."""
KEPT: Final = 0.97
"""Factor by which the weight of earlier chunks fades in each step: in effect, about thirty steps count."""
UNUSUAL: Final = 4.0
"""Factor over the expected time that makes a step unusual, if earlier chunks were as deep.

An unusual step counts only if there was another one of late. Otherwise, one step that stood still for a second (memory,
another process) would keep chunks small for a hundred steps."""
RARE: Final = 30
"""The least number of steps with chunks between ignored ones. More frequent unusual steps show the true cost."""
SEEN: Final = 2.0
"""Factor over the deepest recent chunk up to which a step can be unusual: of deeper chunks, nothing is known yet."""
FLAT: Final = 1e-6
"""Variance of depth, divided by its square, up to which depth is taken to explain nothing."""


class StepCost:
    """An estimate of step times. It is told, for each step, the chunks that were in it and how long it took.

    The time of decoding is a mean over recent steps without prompts, and steps whose engine measured it. The rest of a
    step's time is its chunks'. Each token costs a fixed time, and more for each token before it. A straight line
    through the observations gives both, where older steps weigh less."""

    def __init__(self) -> None:
        self.decode_s = 0.0
        """Seconds of a step without prompts; 0 if there was none yet."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        """Sums over steps with chunks: depth in tokens, seconds for each token."""
        self._usual = 0
        """Steps with chunks since the last unusual one."""
        self._deepest = 0.0
        """Depth of the deepest chunk; earlier ones count less."""

    def saw(self, chunks: Iterable[tuple[int, int]], step: StepSeen) -> None:
        """Learns from a step. ``chunks``: the range ``[start, end)`` of each chunk that was in it."""
        tokens, depth = 0, 0.0
        for start, end in chunks:
            tokens += end - start
            depth += (end - start) * (start + end) / 2
        if not tokens:
            if step.decoded:
                self._decoded(step)
            return
        if step.decoded and step.decode_s > 0.0:
            self.decode_s += (OTHER_WEIGHT if self.decode_s else 1.0) * (step.decode_s - self.decode_s)
            seconds = step.seconds - step.decode_s
        else:
            seconds = step.seconds - self.decode_s if step.decoded else step.seconds
        x, y = depth / tokens, max(0.0, seconds) / tokens
        start_s, slope_s = self.line()
        self._usual += 1
        seen, self._deepest = x <= SEEN * self._deepest, max(x, KEPT * self._deepest)
        if seen and y > UNUSUAL * (start_s + slope_s * x) > 0.0:
            rare, self._usual = self._usual > RARE, 0
            if rare:
                return
        self._weight = KEPT * self._weight + 1.0
        self._x = KEPT * self._x + x
        self._y = KEPT * self._y + y
        self._xx = KEPT * self._xx + x * x
        self._xy = KEPT * self._xy + x * y

    def _decoded(self, step: StepSeen) -> None:
        """Learns from several steps as if each were told alone; each took ``growth_s`` longer than the one before."""
        steps, growth_s = step.steps, step.growth_s
        first_s = step.seconds / steps - growth_s * (steps - 1) / 2
        if self.decode_s <= 0.0:
            self.decode_s = first_s
            first_s += growth_s
            steps -= 1
            if not steps:
                return
        rest = 1.0 - OTHER_WEIGHT
        lag_s = growth_s * rest / OTHER_WEIGHT  # the mean of many such steps lags this far behind the last one
        last_s = first_s + growth_s * (steps - 1)
        self.decode_s = last_s - lag_s + rest**steps * (self.decode_s - (first_s - growth_s - lag_s))

    def line(self) -> tuple[float, float]:
        """Returns the seconds of a prompt's first token, and the extra seconds of a token per token before it."""
        if not self._weight:
            return 0.0, 0.0
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        slope_s = 0.0
        if spread > FLAT * x * x:
            slope_s = max(0.0, (self._xy / self._weight - x * y) / spread)
        if slope_s * x > y:
            return 0.0, y / x
        return y - slope_s * x, slope_s

    def left(self, limit_s: float) -> TimeLeft:
        """Returns the time that a decoding step of at most ``limit_s`` has for chunks."""
        if not self._weight:
            return TimeLeft(0.0, 0.0, 0.0)
        return TimeLeft(max(limit_s - self.decode_s, PROMPT_SHARE * self.decode_s), *self.line())


class TimeLeft:
    """The ``left_s`` of a step for chunks; a token costs ``token_s``, and ``slope_s`` more for each token before it."""

    def __init__(self, left_s: float, token_s: float, slope_s: float) -> None:
        self._left_s, self._token_s, self._slope_s = left_s, token_s, slope_s
        self.cut = False
        """True if a chunk gets less than it would without the limit."""

    def tokens(self, position: int, most: int) -> int:
        """Returns for how many of ``most`` tokens, from ``position`` on, there is time."""
        slope_s = self._slope_s
        token_s = self._token_s + slope_s * position
        if self._left_s <= 0.0:
            fits = 0
        elif self._cost_s(position, most) <= self._left_s:
            return most
        else:  # token_s n + slope_s n² / 2 = left_s
            fits = int(2.0 * self._left_s / (token_s + math.sqrt(token_s * token_s + 2.0 * slope_s * self._left_s)))
        self.cut = True
        return min(most, fits)

    def spend(self, position: int, tokens: int) -> None:
        self._left_s -= self._cost_s(position, tokens)

    def _cost_s(self, position: int, tokens: int) -> float:
        return tokens * (self._token_s + self._slope_s * (position + tokens / 2))
