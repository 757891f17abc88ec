"""Plain target policies, which ignore what was sent where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from pinyon.routing.target import Routed, Target, least_full


@mypyc_attr(allow_interpreted_subclasses=True)
class PlainPolicy:
    """A base class for policies that remember nothing and never let a request wait for a full target."""

    def add(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        pass

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        return None

    def affinity(self, request: Routed, name: str) -> int:
        return 0

    def sent(self, request: Routed, name: str) -> None:
        pass


class LeastLoadedTarget(PlainPolicy):
    """The target with the fewest requests for its size: the baseline LL of SkyWalker §5.1."""

    name: ClassVar[str] = "least_loaded"

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        return least_full(available)


class RoundRobinTarget(PlainPolicy):
    """The target whose last turn is longest ago; ties go to the smaller name: the baseline RR of SkyWalker §5.1."""

    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def add(self, name: str) -> None:
        self._turns.setdefault(name, 0)

    def remove(self, name: str) -> None:
        self._turns.pop(name, None)

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        turns, best = self._turns, available[0]
        best_rank = (turns.get(best.name, 0), best.name)
        for target in available[1:]:
            rank = (turns.get(target.name, 0), target.name)
            if rank < best_rank:
                best, best_rank = target, rank
        return best

    def sent(self, request: Routed, name: str) -> None:
        self._turn += 1
        if name in self._turns:
            self._turns[name] = self._turn
