"""The options of ``feather``: how long somebody is passed over, and who says that a batch stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pinyon.batching.prefix_line import SharedPrefixSettings
from pinyon.batching.stopping import (
    Always,
    Bandit,
    BanditSettings,
    Heuristic,
    HeuristicSettings,
    QLearning,
    QLearningSettings,
    StoppingPolicy,
)

__all__ = ["FeatherSettings", "Learning"]


class Learning(StrEnum):
    """How ``feather`` decides that a batch stays as it is."""

    BANDIT = "bandit"
    Q_LEARNING = "q_learning"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FeatherSettings(SharedPrefixSettings):
    """``stop``: who says that the batch stays as it is. ``seed``: of Q-learning's explorations."""

    stop: Learning = Learning.BANDIT
    seed: int = 0

    def stopping(self) -> StoppingPolicy:
        if self.stop is Learning.BANDIT:
            return Bandit(BanditSettings())
        if self.stop is Learning.Q_LEARNING:
            return QLearning(QLearningSettings(seed=self.seed))
        return Heuristic(HeuristicSettings()) if self.stop is Learning.HEURISTIC else Always()
