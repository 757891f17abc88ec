"""Explanations of placements come part by part, and are bounded in number."""

from __future__ import annotations

import pytest

from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from pinyon.placement.decision_log import DecisionLog
from pinyon.placement.policy import PlacementRequest
from services.conductor.servicer import DECISIONS_MAX, explained


async def test_of_many_decisions_the_last_ones_are_told() -> None:
    log = DecisionLog(1000, 1 << 20, 1)
    for number in range(DECISIONS_MAX + 1):
        log.refused(PlacementRequest("r", "m", 1), Unavailable("no"), float(number))
    told = [age_s async for _, _, age_s in explained(log, "r", lambda: float(DECISIONS_MAX))]
    assert told == [float(age) for age in reversed(range(DECISIONS_MAX))]


async def test_what_cannot_be_answered_is_said() -> None:
    log = DecisionLog(1000, 1 << 20, 1)
    for kept, asked, error in (None, "r", FailedPrecondition), (log, "r", NotFound), (log, "", InvalidArgument):
        with pytest.raises(error):
            await anext(explained(kept, asked, lambda: 0.0))
