"""The batching policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pinyon.batching.cached_prefix_line import ByCachedPrefix, CachedPrefixSettings
from pinyon.batching.dfs_weight import DfsWeight
from pinyon.batching.double_counting import DoubleCounting
from pinyon.batching.dynamic_batch import DynamicBatch, DynamicBatchSettings
from pinyon.batching.fcfs import Fcfs
from pinyon.batching.feather_settings import FeatherSettings, Learning
from pinyon.batching.group_rounds import GroupRounds
from pinyon.batching.longest_match import LongestMatch, LongestMatchSettings
from pinyon.batching.policy import BatchingPolicy, Holdings
from pinyon.batching.prefix_line import BySharedPrefix, SharedPrefixSettings
from pinyon.batching.rounds import PrefixRounds, Rounds
from pinyon.batching.service_order import MostInTime
from pinyon.batching.waiting_line import ByTurn, RoomInTimeSettings
from pinyon.core.policies import NoSettings, Registry

__all__ = ["BATCHING_DEFAULT", "BATCHING_POLICIES", "Batching", "FeatherSettings", "Learning"]


@dataclass(frozen=True, slots=True)
class OracleSettings:
    """``group_blocks``: who has the same so many first blocks is of one group. ``passed_over_s``: as of ``feather``."""

    group_blocks: int = 4
    passed_over_s: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.group_blocks <= 4096:
            raise ValueError("group_blocks must be from 1 to 4096")
        self.line()

    def line(self) -> SharedPrefixSettings:
        return SharedPrefixSettings(self.group_blocks, self.passed_over_s)


class Batching(Protocol):
    """A choice: who gets KV memory, and whom a step decodes of those that have it."""

    def policy(self, holdings: Holdings) -> BatchingPolicy:
        """A new one that is told and asked."""
        ...

    def rounds(self, kernel: str) -> Rounds | None:
        """For an engine with this attention kernel ("": it is not known). None: a step decodes all that run."""
        return None


class _Made(NamedTuple):
    """A :class:`Batching` of two functions."""

    policy: Callable[[Holdings], BatchingPolicy]
    rounds: Callable[[str], Rounds | None]


def _everybody(kernel: str) -> None:
    """A step decodes all that run."""


def _fcfs(_: NoSettings) -> Batching:
    return _Made(Fcfs, _everybody)


def _most_in_time(settings: RoomInTimeSettings) -> Batching:
    return _Made(lambda holdings: Fcfs(holdings, ByTurn(MostInTime(settings))), _everybody)


def _feather(settings: FeatherSettings) -> Batching:
    return _Made(
        lambda holdings: Fcfs(holdings, BySharedPrefix(settings, by_tip=settings.by_tip)),
        lambda kernel: PrefixRounds(settings.stopping(kernel), settings.chunk_blocks, settings.by_tip),
    )


def _oracle(settings: OracleSettings) -> Batching:
    return _Made(
        lambda holdings: Fcfs(holdings, BySharedPrefix(settings.line(), levels=1)),
        lambda kernel: GroupRounds(settings.group_blocks),
    )


def _lpm(settings: LongestMatchSettings) -> Batching:
    return _Made(lambda holdings: Fcfs(holdings, ByCachedPrefix(LongestMatch(settings), settings)), _everybody)


def _dfs_weight(settings: CachedPrefixSettings) -> Batching:
    return _Made(lambda holdings: Fcfs(holdings, ByCachedPrefix(DfsWeight(), settings)), _everybody)


def _double_counting(holdings: Holdings) -> BatchingPolicy:
    counting = DoubleCounting(holdings)
    return Fcfs(counting, bound=counting)


def _sglang_fcfs(_: NoSettings) -> Batching:
    return _Made(_double_counting, _everybody)


def _dynamic(settings: DynamicBatchSettings) -> Batching:
    return _Made(lambda holdings: Fcfs(holdings, bound=DynamicBatch(settings)), _everybody)


BATCHING_POLICIES: Registry[Batching] = Registry(
    "batching",
    {
        "fcfs": (NoSettings, _fcfs),
        MostInTime.name: (RoomInTimeSettings, _most_in_time),
        "feather": (FeatherSettings, _feather),
        "oracle": (OracleSettings, _oracle),
        "lpm": (LongestMatchSettings, _lpm),
        "dfs_weight": (CachedPrefixSettings, _dfs_weight),
        "sglang_fcfs": (NoSettings, _sglang_fcfs),
        "dynamic": (DynamicBatchSettings, _dynamic),
    },
    Batching,
)
BATCHING_DEFAULT = "fcfs"
"""Of a worker, and of a simulation of whole machines."""
