"""The kinds of a replayed pool, named after the part that sends requests or blocks to nodes."""

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
        """Returns the counts of the pool and of each node."""
        ...


Build = Callable[[MakePolicy], Pool]
Kind = Callable[[PoolSize, int], Build]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The settings of :class:`Coldest`: the number of candidate nodes per block, and the seed that draws them."""

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
    """Returns a builder of pools for :func:`~pinyon_lab.caches.replay.replayed`.

    A victim with another copy is looked for among the next ``last_copies`` ones. Raises ``ValueError`` for an unknown
    router or bad settings.
    """
    if not 0 <= last_copies <= LOOK_AHEAD_MAX:
        raise ValueError(f"last copies are looked for among at most {LOOK_AHEAD_MAX} victims, got {last_copies}")
    return POOLS.make(router)(size, last_copies)
