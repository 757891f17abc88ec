"""The batching policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.interface import Batching, BatchingPolicy, Rounds
from pinyon.batching.policy import HeldBlocks
from pinyon.batching.prefix_line import BySharedPrefix, FeatherSettings
from pinyon.batching.rounds import PrefixRounds
from pinyon.batching.service_order import MostInTime
from pinyon.batching.waiting_line import ByTurn, RoomInTimeSettings
from pinyon.core.policies import NoSettings, Registry


def _everybody(kernel: str) -> None:
    """Returns None, which means that a step decodes all running requests."""


class _Made(NamedTuple):
    """A :class:`Batching` of two functions."""

    policy: Callable[[HeldBlocks], BatchingPolicy]
    rounds: Callable[[str], Rounds | None] = _everybody


def _most_in_time(settings: RoomInTimeSettings) -> Batching:
    return _Made(lambda holdings: Fcfs(holdings, ByTurn(MostInTime(settings))))


def _feather(settings: FeatherSettings) -> Batching:
    return _Made(
        lambda holdings: Fcfs(holdings, BySharedPrefix(settings)),
        lambda kernel: PrefixRounds(settings.stopping(kernel), settings.chunk_blocks),
    )


BATCHING_POLICIES: Registry[Batching] = Registry(
    "batching",
    {
        "fcfs": (NoSettings, lambda _: _Made(Fcfs)),
        MostInTime.name: (RoomInTimeSettings, _most_in_time),
        "feather": (FeatherSettings, _feather),
    },
    Batching,
)
BATCHING_DEFAULT = "fcfs"
"""The default of a worker, and of a simulation of whole machines."""
