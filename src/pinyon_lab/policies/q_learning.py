"""Q-learning of when a batch is better left as it is (FEATHER §4.3.4): the baseline of the bandit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from pinyon.batching.stopping import (
    ADD,
    KNOWN_MIN,
    STOP,
    BatchState,
    Bins,
    Drift,
    Taken,
    binned,
    bins_of,
    bins_text,
    table_numbers,
)

TRIALS: Final = 2
"""The place of the numbers of trials in what is known of a state, behind the values of both actions."""


@dataclass(frozen=True, slots=True)
class QLearningSettings:
    """The parameters α, γ and ε of §4.3.4, whose values are not printed there.

    ``decay`` is that of ε, with each episode; after a shift, ε is at least ``awake``."""

    rate: float = 0.1
    discount: float = 0.8
    decay: float = 0.97
    explore_min: float = 0.01
    awake: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.rate <= 1 and 0 <= self.discount < 1 and 0 < self.decay <= 1):
            raise ValueError("0 < rate <= 1, 0 <= discount < 1 and 0 < decay <= 1 must hold")
        if not 0 <= self.explore_min <= self.awake <= 1:
            raise ValueError("0 <= explore_min <= awake <= 1 must hold")


class QLearning:
    """An ε-greedy choice over Q(s, a). A batch is an episode, which ends when the batch is left as it is.

    Adding is worth (1 - γ) of the reward and γ of what can be had from the next state on; stopping is worth all of the
    reward. So values are tokens/s, and adding is not worth more for being followed by more decisions."""

    def __init__(self, settings: QLearningSettings) -> None:
        self.learns = True
        self._settings = settings
        self._random = Random(settings.seed)
        self._known: dict[Bins, list[float]] = {}
        """The values of stopping and adding (negative: never tried), then how often each was tried."""
        self.exploring = 1.0
        self._drift = Drift()

    @property
    def shifts(self) -> int:
        return self._drift.shifts

    def seen(self, state: BatchState) -> tuple[int, ...]:
        return binned(state)

    def adds(self, state: BatchState) -> bool:
        values = self._known.get(binned(state))
        # Of untried actions, adding comes first, because other policies always add.
        if values is None or values[ADD] < 0.0 or values[STOP] < 0.0:
            return values is None or values[ADD] < 0.0
        if self._random.random() < self.exploring:
            return self._random.random() < 0.5
        return values[ADD] >= values[STOP]

    def learn(self, episode: Sequence[Taken], tokens_s: float) -> None:
        settings = self._settings
        following: Bins | None = None
        apart: list[float] = []
        for state, action in reversed(episode):
            bins = binned(state)
            known = self._known.setdefault(bins, [-1.0, -1.0, 0.0, 0.0])
            target = tokens_s
            if action == ADD and following is not None:
                target += settings.discount * (max(self._known[following][:TRIALS]) - tokens_s)
            if known[action] < 0:
                known[action] = target
            else:
                if known[TRIALS + action] >= KNOWN_MIN and known[action] > 0:
                    apart.append(target / known[action] - 1.0)
                known[action] += settings.rate * (target - known[action])
            known[TRIALS + action] += 1.0
            following = bins
        self.exploring = max(self.exploring * settings.decay, settings.explore_min)
        if self._drift.shifted(apart):
            self.exploring = max(self.exploring, settings.awake)

    def table(self) -> dict[str, list[float]]:
        return {bins_text(bins): [*known] for bins, known in self._known.items()}

    def restore(self, table: Mapping[str, Sequence[float]]) -> None:
        restored: dict[Bins, list[float]] = {}
        for text, numbers in table.items():
            known = table_numbers(numbers, 2 * TRIALS)
            if min(known[TRIALS:]) < 0:
                raise ValueError(f"a state was never tried less often than never: {text}")
            restored[bins_of(text)] = known
        self._known = restored
        if restored:
            self.exploring = self._settings.explore_min
