"""The kinds of a replayed pool, by the name of what sends requests or blocks to nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pinyon.core.policies import NoSettings, Registry, check_bounds
from pinyon_lab.caches.pool_replay import (
    Affinity,
    CacheAffinity,
    Coldest,
    GlobalPool,
    LocalCaches,
    PoolSize,
    RoundRobin,
    Router,
)
from pinyon_lab.caches.replay import MakePolicy, Replaying

LOOK_AHEAD = 8
LOOK_AHEAD_MAX = 1024
CANDIDATES_MAX = 16


class Pool(Replaying, Protocol):
    def result(self) -> dict[str, Any]:
        """What is on the nodes, and what they did."""
        ...


Build = Callable[[MakePolicy], Pool]
Kind = Callable[[PoolSize, int], Build]


@dataclass(frozen=True, slots=True)
class Drawn:
    """``candidates`` of each block, drawn by ``seed``."""

    candidates: int = 2
    seed: int = 1

    def __post_init__(self) -> None:
        check_bounds(self, candidates=(1, CANDIDATES_MAX))


def _local(router: Callable[[], Router]) -> Kind:
    return lambda size, last_copies: lambda make: LocalCaches(make, size, router(), last_copies)


def _single(build: Callable[[MakePolicy, PoolSize], Pool]) -> Kind:
    def of(size: PoolSize, last_copies: int) -> Build:
        if last_copies:
            raise ValueError("last copies are looked for in local caches: here each block is there once")
        return lambda make: build(make, size)

    return of


def _coldest(drawn: Drawn) -> Kind:
    return _single(lambda make, size: Coldest(make, size, drawn.candidates, random.Random(drawn.seed)))


POOLS: Registry[Kind] = Registry(
    "router",
    {
        "cache_affinity": (Affinity, lambda settings: _local(lambda: CacheAffinity(settings))),
        "round_robin": (NoSettings, lambda _: _local(RoundRobin)),
        "global": (NoSettings, lambda _: _single(GlobalPool)),
        "coldest": (Drawn, _coldest),
    },
)


def pool(router: str, size: PoolSize, last_copies: int = 0) -> Build:
    """For :func:`~pinyon_lab.caches.replay.replayed`. ``last_copies``: how many victims are searched for one with
    another copy. Raises ``ValueError``."""
    if not 0 <= last_copies <= LOOK_AHEAD_MAX:
        raise ValueError(f"last copies are looked for among at most {LOOK_AHEAD_MAX} victims, got {last_copies}")
    return POOLS.make(router)(size, last_copies)
