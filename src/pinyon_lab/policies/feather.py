"""The variants of ``feather`` that exist only for comparison: its options, and another measure for the next request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pinyon.batching.chunked_hash_tree import ARRIVALS, BestRequest, ChunkedHashTree
from pinyon.batching.prefix_line import FeatherSettings, SharedPrefixSettings, StoppingRule
from pinyon.batching.stopping import StoppingPolicy
from pinyon_lab.policies.q_learning import QLearning, QLearningSettings


class LabLearning(StrEnum):
    """The ways to learn when a batch takes no more requests, with Q-learning."""

    BANDIT = "bandit"
    Q_LEARNING = "q_learning"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class LabFeatherSettings(SharedPrefixSettings):
    """The settings of ``feather`` in the laboratory; ``stop`` is as in :class:`FeatherSettings`.

    ``seed`` is that of Q-learning's explorations. With ``by_tip``, the next request is the one that shortens the shared
    prefix least, not the one that lacks the fewest covered levels: the ablation of appendix A.9."""

    stop: LabLearning = LabLearning.BANDIT
    seed: int = 0
    by_tip: bool = False

    def stopping(self, kernel: str = "") -> StoppingPolicy:
        """Returns the stopping policy, see :meth:`FeatherSettings.stopping`."""
        if self.stop is LabLearning.Q_LEARNING:
            return QLearning(QLearningSettings(seed=self.seed))
        return FeatherSettings(stop=StoppingRule(self.stop.value)).stopping(kernel)


R = TypeVar("R")


class TipTree(ChunkedHashTree[R]):
    """A tree whose next request shortens the shared prefix least; ties go to the shortest, then to the oldest (A.9)."""

    def _find(self) -> BestRequest[R]:
        node = self._tip
        while not node.waiting and node.parent is not None:
            node = node.parent
        return self.look(self._by_arrival[node.best & ARRIVALS])
