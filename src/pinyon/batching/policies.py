"""The batching policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchingPolicy, Holdings
from pinyon.batching.prefix_line import BySharedPrefix, SharedPrefixSettings
from pinyon.batching.rounds import PrefixRounds, Rounds
from pinyon.batching.service_order import MostInTime
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
from pinyon.batching.waiting_line import ByTurn, RoomInTimeSettings
from pinyon.core.policies import NoSettings, Registry

__all__ = ["BATCHING_DEFAULT", "BATCHING_POLICIES", "Batching", "FeatherSettings", "Learning"]


GROUPED = "grouped"


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

    def stopping(self, kernel: str = "") -> StoppingPolicy:
        """``kernel``: how the engine's decode attention reads shared KV. Where each group of a batch reads its own
        prefix once (``grouped``, as PAT does), a larger batch costs no prefix anything: rules that keep it from
        growing are of no use, and those that learn find that out."""
        if self.stop is Learning.HEURISTIC and kernel == GROUPED:
            return Always()
        if self.stop is Learning.BANDIT:
            return Bandit(BanditSettings())
        if self.stop is Learning.Q_LEARNING:
            return QLearning(QLearningSettings(seed=self.seed))
        return Heuristic(HeuristicSettings()) if self.stop is Learning.HEURISTIC else Always()


class Batching(NamedTuple):
    """A choice: who gets KV memory, and whom a step decodes of those that have it."""

    policy: Callable[[Holdings], BatchingPolicy]
    rounds: Callable[[str], Rounds | None]
    """For an engine with this attention kernel; "": it is not known."""


def _everybody(kernel: str) -> None:
    """A step decodes all that run."""


def _fcfs(_: NoSettings) -> Batching:
    return Batching(Fcfs, _everybody)


def _most_in_time(settings: RoomInTimeSettings) -> Batching:
    return Batching(lambda holdings: Fcfs(holdings, ByTurn(MostInTime(settings))), _everybody)


def _feather(settings: FeatherSettings) -> Batching:
    return Batching(
        lambda holdings: Fcfs(holdings, BySharedPrefix(settings)),
        lambda kernel: PrefixRounds(settings.stopping(kernel), settings.chunk_blocks),
    )


BATCHING_POLICIES: Registry[Batching] = Registry(
    "batching",
    {
        "fcfs": (NoSettings, _fcfs),
        MostInTime.name: (RoomInTimeSettings, _most_in_time),
        "feather": (FeatherSettings, _feather),
    },
)
BATCHING_DEFAULT = "fcfs"
"""Of a worker, and of a simulation of whole machines."""
