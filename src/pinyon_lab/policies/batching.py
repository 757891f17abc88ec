"""The batching policies that ``feather`` is compared with (FEATHER §5.1.3, §5.3.1), and variants of ``feather``.

This file stays Python although its parts are compiled: a service that loads a class reads its annotations."""

from __future__ import annotations

from functools import partial

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.interface import Batching, BatchingPolicy, Rounds
from pinyon.batching.policy import HeldBlocks
from pinyon.batching.prefix_line import BySharedPrefix
from pinyon.batching.rounds import PrefixRounds
from pinyon_lab.policies.bounded import BoundedFcfs, DoubleCounting
from pinyon_lab.policies.cached_prefix_line import (
    ByCachedPrefix,
    CachedPrefixSettings,
    LongestMatchSettings,
    dfs_weight,
    longest_match,
)
from pinyon_lab.policies.dynamic_batch import DynamicBatch, DynamicBatchSettings
from pinyon_lab.policies.feather import LabFeatherSettings, TipTree
from pinyon_lab.policies.group_rounds import ByFirstLevel, GroupRounds, OracleSettings


class Oracle(Batching):
    """``oracle``, which knows the groups and compares nothing else."""

    def __init__(self, settings: OracleSettings) -> None:
        self._settings = settings

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        return Fcfs(holdings, ByFirstLevel(self._settings.line()))

    def rounds(self, kernel: str) -> Rounds:
        return GroupRounds(self._settings.group_blocks)


class Feather(Batching):
    """``feather``, with the other measure and Q-learning as options."""

    def __init__(self, settings: LabFeatherSettings) -> None:
        self._settings = settings

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        return Fcfs(holdings, BySharedPrefix(self._settings, TipTree(1) if self._settings.by_tip else None))

    def rounds(self, kernel: str) -> Rounds:
        settings = self._settings
        tree: TipTree[int] | None = TipTree(1) if settings.by_tip else None
        return PrefixRounds(settings.stopping(kernel), settings.chunk_blocks, tree)


class Lpm(Batching):
    """``lpm``, SGLang's longest prefix match."""

    def __init__(self, settings: LongestMatchSettings) -> None:
        self._settings = settings

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        order = partial(longest_match, fallback=self._settings.fallback)
        return Fcfs(holdings, ByCachedPrefix(order, self._settings))


class SglangDfsWeight(Batching):
    """``dfs_weight``, SGLang's DFS-weight."""

    def __init__(self, settings: CachedPrefixSettings) -> None:
        self._settings = settings

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        return Fcfs(holdings, ByCachedPrefix(dfs_weight, self._settings))


class SglangFcfs(Batching):
    """``sglang_fcfs``, in order of arrival; shared blocks count once for each request."""

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        counting = DoubleCounting(holdings)
        return BoundedFcfs(counting, counting)


class Dynamic(Batching):
    """``dynamic``, in order of arrival, with as many requests as a limit on the time between tokens allows."""

    def __init__(self, settings: DynamicBatchSettings) -> None:
        self._settings = settings

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        return BoundedFcfs(holdings, DynamicBatch(self._settings))
