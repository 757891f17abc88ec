"""The options of ``feather`` with those to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pinyon.batching.feather_settings import FeatherSettings, Learning
from pinyon.batching.prefix_line import SharedPrefixSettings
from pinyon.batching.stopping import StoppingPolicy
from pinyon_lab.policies.q_learning import QLearning, QLearningSettings


class LabLearning(StrEnum):
    """Also by Q-learning."""

    BANDIT = "bandit"
    Q_LEARNING = "q_learning"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class LabFeatherSettings(SharedPrefixSettings):
    """``stop``: as of :class:`FeatherSettings`. ``seed``: of Q-learning's explorations. ``by_tip``: next is by whom the
    shared prefix loses least, not who misses least of what is covered: the ablation of appendix A.9."""

    stop: LabLearning = LabLearning.BANDIT
    seed: int = 0
    by_tip: bool = False

    def stopping(self, kernel: str = "") -> StoppingPolicy:
        """See :meth:`FeatherSettings.stopping`."""
        if self.stop is LabLearning.Q_LEARNING:
            return QLearning(QLearningSettings(seed=self.seed))
        return FeatherSettings(stop=Learning(self.stop.value)).stopping(kernel)
