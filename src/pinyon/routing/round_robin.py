"""Everyone in turn, whatever they do: the baseline of SkyWalker §5 and of most load balancers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pinyon.routing.policy import Candidate, Group, Pair

__all__ = ["RoundRobin"]

REMEMBERED_MAX = 8192


class RoundRobin:
    """The decode instance whose last turn is longest ago (then the smaller id), and the same among its prefill
    instances. Mixed instances alone take the same turn in both lists, so no KV moves."""

    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._turns: tuple[dict[str, int], dict[str, int]] = ({}, {})  # of prefills, of decodes; oldest turn first
        self._turn = 0

    def choose(self, groups: Sequence[Group], in_flight: Mapping[str, int]) -> Pair | None:
        if not groups:
            return None
        self._turn += 1
        prefills, decodes = self._turns
        decode = self._next(decodes, [candidate for group in groups for candidate in group.decodes])
        group = next(group for group in groups if group.name == decode.group)
        return Pair(self._next(prefills, group.prefills), decode)

    def _next(self, turns: dict[str, int], candidates: Sequence[Candidate]) -> Candidate:
        chosen = min(candidates, key=lambda each: (turns.get(each.instance_id, 0), each.instance_id))
        turns.pop(chosen.instance_id, None)
        turns[chosen.instance_id] = self._turn
        if len(turns) > REMEMBERED_MAX:  # instances that went long ago
            del turns[next(iter(turns))]
        return chosen
