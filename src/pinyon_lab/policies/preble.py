"""Preble (Srivatsa et al.), as DualMap's appendix B describes it: exploit a prefix that is long, else explore."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np

from pinyon.placement.at_one import at_one
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch


@dataclass(frozen=True, slots=True)
class PrebleSettings:
    """``share``: of the prompt; whoever holds more of it gets it. ``combined``: else "a combination of request
    inference cost and current instance load" decides (appendix B), or else load alone."""

    share: float = 0.5
    combined: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {self.share}")


class Preble:
    """The instance that holds most of the prompt, of equals the least loaded, if that is more than a share of it."""

    name: ClassVar[str] = "preble"
    settings_type: ClassVar[type[PrebleSettings]] = PrebleSettings

    def __init__(self, settings: PrebleSettings = PrebleSettings()) -> None:
        self._share = settings.share
        self._combined = settings.combined

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        reused = pool.reused_tokens(request, match.soon)
        costs_s = pool.waits_s(now_s)
        most = reused.max()
        if most > self._share * request.prompt_tokens:
            costs_s[reused < most] = np.inf
        elif self._combined:
            costs_s += pool.prefills_s(request.prompt_tokens, reused)
        return at_one(self.name, request, pool, match, pool.lowest(costs_s), now_s)
