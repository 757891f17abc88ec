"""Policies as an outsider might write them: each derives only from the interface meant for it.

Tests choose them by ``tests.own_policies:CLASS``, also in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, ClassVar

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.interface import Batching, BatchingPolicy, Rounds, ServiceOrder, WaitingLine
from pinyon.batching.policy import BatchRequest, HeldBlocks, StepSeen
from pinyon.batching.rounds import Formed
from pinyon.batching.stopping import Always
from pinyon.batching.waiting_line import ByNumber
from pinyon.eviction.interface import EvictionPolicy, Traits
from pinyon.placement.at_one import at_one
from pinyon.placement.interface import PlacementPolicy
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.routing.interface import PushingRule, TargetPolicy
from pinyon.routing.target import Routed, Target

MODULE = "tests.own_policies"


class End(StrEnum):
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True)
class AtEndSettings:
    end: End = End.FIRST
    distance: int = 0

    def __post_init__(self) -> None:
        if self.distance < 0:
            raise ValueError("distance must be at least 0")


class AtEnd(PlacementPolicy):
    """The first or the last instances by id, as many as configured."""

    name: ClassVar[str] = "at_end"  # type: ignore[misc]

    def __init__(self, settings: AtEndSettings = AtEndSettings()) -> None:
        self._settings = settings

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        place = self._settings.distance % len(pool.prefills)
        instance = pool.prefills[-1 - place if self._settings.end is End.LAST else place]
        return at_one(self.name, request, pool, match, instance, now_s)


class Newest(EvictionPolicy[Any]):
    """An eviction policy that evicts first the block that became evictable last."""

    def __init__(self) -> None:
        self._free: dict[Any, None] = {}

    def stored(
        self, keys: Sequence[Any], now_s: float, traits: Traits, offsets: Sequence[int], after: Any = None
    ) -> None:
        self._free.update(dict.fromkeys(keys))

    def used(self, keys: Sequence[Any], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        pass

    def pinned(self, keys: Sequence[Any], now_s: float) -> None:
        self.dropped(keys, now_s)

    def unpinned(self, keys: Sequence[Any], now_s: float) -> None:
        self._free.update(dict.fromkeys(keys))

    def dropped(self, keys: Sequence[Any], now_s: float) -> None:
        for key in keys:
            self._free.pop(key, None)

    def victims(self, count: int, now_s: float) -> list[Any]:
        return [self._free.popitem()[0] for _ in range(min(count, len(self._free)))]

    def peek(self, now_s: float) -> tuple[float, Any] | None:
        return (-now_s, next(reversed(self._free))) if self._free else None

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, key: object) -> bool:
        return key in self._free


class LastComes(ServiceOrder[Any]):
    """A service order that serves the latest arrival first."""

    short_first: ClassVar[bool] = False

    def __init__(self) -> None:
        self._all: dict[Any, None] = {}

    def add(self, waiting: Any, came_s: float, seconds: float, deadline_s: float) -> None:
        self._all[waiting] = None

    def turns(self, now_s: float) -> Iterator[Any]:
        return iter(list(reversed(self._all)))

    def take(self, waiting: Any, now_s: float) -> None:
        self.remove(waiting)

    def advance(self, waiting: Any, seconds: float) -> None:
        pass

    def remove(self, waiting: Any) -> None:
        del self._all[waiting]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


@dataclass(frozen=True)
class FewSettings:
    at_once: int = 1


class Few(Batching):
    """A batching that runs a bounded number of requests and decodes one of them per step."""

    def __init__(self, settings: FewSettings) -> None:
        self._at_once = settings.at_once

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        return FewAdmitted(holdings, self._at_once)

    def rounds(self, kernel: str) -> Rounds:
        return Singly()


class FewAdmitted(BatchingPolicy):
    """The ``fcfs`` policy with fewer slots."""

    def __init__(self, holdings: HeldBlocks, at_once: int) -> None:
        self._fcfs, self._at_once = Fcfs(holdings, AsTheyCame()), at_once

    @property
    def waiting(self) -> int:
        return self._fcfs.waiting

    @property
    def running(self) -> int:
        return self._fcfs.running

    def enqueue(self, request: BatchRequest) -> None:
        self._fcfs.enqueue(request)

    def adopt(self, request: BatchRequest, now_s: float) -> None:
        self._fcfs.adopt(request, now_s)

    def admit(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        return self._fcfs.admit(max(0, min(slots, self._at_once - self.running)), room_blocks, now_s)

    def claimant(self) -> int | None:
        return self._fcfs.claimant()

    def passed_over_s(self, number: int) -> float:
        return self._fcfs.passed_over_s(number)

    def gave_way(self, number: int) -> bool:
        return self._fcfs.gave_way(number)

    def remove(self, number: int) -> bool:
        return self._fcfs.remove(number)

    def observe(self, step: StepSeen) -> None:
        self._fcfs.observe(step)


class AsTheyCame(WaitingLine):
    def __init__(self) -> None:
        self._line = ByNumber()

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, number: int) -> bool:
        return number in self._line

    def add(self, request: BatchRequest, again: bool) -> None:
        self._line.add(request, again)

    def remove(self, number: int) -> bool:
        return self._line.remove(number)

    def begin(self, now_s: float, room_blocks: int) -> None:
        pass

    def at(self, place: int) -> BatchRequest | None:
        return self._line.at(place)

    def take(self, number: int, room_blocks: int) -> None:
        self._line.remove(number)

    def end(self) -> None:
        pass

    def claims(self, number: int) -> bool:
        return True

    def adopt(self, request: BatchRequest) -> None:
        pass

    def passed_over_s(self, number: int) -> float:
        return 0.0

    def ended(self, number: int) -> None:
        pass


class Singly(Rounds):
    """Rounds whose batch is a single request; the requests take turns."""

    def __init__(self) -> None:
        self.chunk_blocks, self.stopping = 1, Always()
        self._turns: list[int] = []

    def add(self, number: int, path: Sequence[int]) -> None:
        self._turns.append(number)

    def remove(self, number: int) -> None:
        if number in self._turns:
            self._turns.remove(number)

    def next(self) -> list[int]:
        return self._turns[:1]

    def done(self) -> None:
        self._turns.append(self._turns.pop(0))

    def observe(self, step: StepSeen) -> None:
        pass

    @property
    def batches(self) -> int:
        return len(self._turns)

    @property
    def share(self) -> bool:
        return False

    @property
    def formed(self) -> Formed:
        return Formed(len(self._turns), 1)


class ByLastName(TargetPolicy):
    """A policy that takes the available target whose name sorts last."""

    name: ClassVar[str] = "by_last_name"  # type: ignore[misc]

    def add(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        pass

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        return max(available, key=lambda target: target.name)

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        return None

    def affinity(self, request: Routed, name: str) -> int:
        return 0

    def sent(self, request: Routed, name: str) -> None:
        pass


class OneEach(PushingRule):
    """A pushing rule with at most one of our requests at each target."""

    name: ClassVar[str] = "one_each"  # type: ignore[misc]

    def spare(self, target: Target, now_s: float) -> int:
        return int(target.live and not target.outstanding)

    def admits(self, target: Target, now_s: float) -> bool:
        return False
