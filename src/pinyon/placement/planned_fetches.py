"""Fetches that placements planned and instances have not reported yet: a measurement of any other is not believed."""

from __future__ import annotations

from collections import deque

from pinyon.core.key_sample import EVERY_MAX
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementDecision

PAIR_MAX = 256
"""The limit of planned fetches of one reader from one source; beyond it, the newest are kept."""

Plans = deque[tuple[float, int]]
"""The planned fetches of one pair, the oldest first: the time of the plan, and the largest number of bytes."""


class PlannedFetches:
    """Planned fetches by reader and source. A plan lasts until the reader reports a fetch from the source that fits it,
    or for ``lasts_s`` seconds. Beyond ``limit`` plans, the pair that was planned for longest ago is dropped."""

    def __init__(self, limit: int, lasts_s: float) -> None:
        self._limit = limit
        self._lasts_s = lasts_s
        self._plans: dict[tuple[InstanceState, InstanceState], Plans] = {}
        """Plans by pair, none of them empty; the pair that was planned for last comes last."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def plan(self, decision: PlacementDecision, now_s: float) -> None:
        reader = decision.prefill
        layout = reader.info.layout
        if layout is None:
            return
        for span in decision.fetches:
            # the source of a span is also asked for the first blocks of the next one: only a sample of blocks is known
            size = (span.block_count + EVERY_MAX - 1) * layout.block_bytes
            pair = reader, span.source
            plans: Plans = self._plans.pop(pair, deque())
            self._plans[pair] = plans
            plans.append((now_s, size))
            self._count += 1
            if len(plans) > PAIR_MAX:
                plans.popleft()
                self._count -= 1
        while self._count > self._limit:
            self._drop_oldest()

    def came(self, reader: InstanceState, source: InstanceState, size_bytes: int, now_s: float) -> bool:
        """Returns whether a reported fetch of ``size_bytes`` was planned. It fulfils the smallest plan that fits, of
        equal ones the oldest: prompts overtake each other."""
        pair = reader, source
        plans = self._plans.get(pair)
        if plans is None:
            return False
        best, least = -1, 0
        for place, (planned_s, size) in enumerate(plans):
            if size_bytes <= size and now_s - planned_s <= self._lasts_s and (best < 0 or size < least):
                best, least = place, size
        if best < 0:
            return False
        del plans[best]
        self._count -= 1
        if not plans:
            del self._plans[pair]
        return True

    def expire(self, now_s: float) -> None:
        """Forgets pairs that nothing was planned for in the last ``lasts_s`` seconds."""
        while self._plans:
            plans = next(iter(self._plans.values()))
            if now_s - plans[-1][0] <= self._lasts_s:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        pair = next(iter(self._plans))
        self._count -= len(self._plans.pop(pair))
