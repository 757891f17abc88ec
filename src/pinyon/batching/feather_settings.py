"""The options of ``feather``: how long somebody is passed over, and who says that a batch stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pinyon.batching.prefix_line import SharedPrefixSettings
from pinyon.batching.stopping import (
    Always,
    Bandit,
    BanditSettings,
    Heuristic,
    HeuristicSettings,
    StoppingPolicy,
)

GROUPED = "grouped"
"""The kernel that reads what each group of a batch shares once."""
WHOLE = "whole"
"""The kernel that reads what all of a batch share once."""


class Learning(StrEnum):
    """How ``feather`` decides that a batch stays as it is."""

    BANDIT = "bandit"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FeatherSettings(SharedPrefixSettings):
    """``stop``: who says that the batch stays as it is."""

    stop: Learning = Learning.BANDIT

    def stopping(self, kernel: str = "") -> StoppingPolicy:
        """``kernel``: how the engine's decode attention reads shared KV. Where each group of a batch reads its own
        prefix once (``grouped``, as PAT does), a larger batch costs no prefix anything: rules that keep it from
        growing are of no use, and those that learn find that out."""
        if self.stop is Learning.HEURISTIC and kernel == GROUPED:
            return Always()
        if self.stop is Learning.BANDIT:
            return Bandit(BanditSettings())
        return Heuristic(HeuristicSettings()) if self.stop is Learning.HEURISTIC else Always()
