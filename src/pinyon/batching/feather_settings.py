"""The options of ``feather``: how long a request may be passed over, and by what rule a batch stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pinyon.batching.prefix_line import SharedPrefixSettings
from pinyon.batching.stopping import Always, Bandit, Heuristic, StoppingPolicy

GROUPED = "grouped"
"""The kernel that reads once what each group of a batch shares."""
WHOLE = "whole"
"""The kernel that reads once what all of a batch share."""


class StoppingRule(StrEnum):
    """The rule by which ``feather`` decides that a batch stays as it is."""

    BANDIT = "bandit"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FeatherSettings(SharedPrefixSettings):
    """Options with ``stop``, the rule by which a batch stays as it is."""

    stop: StoppingRule = StoppingRule.BANDIT

    def stopping(self, kernel: str = "") -> StoppingPolicy:
        """Returns the rule for a ``kernel``: how the engine's decode attention reads shared KV.

        Where each group of a batch reads its own prefix once (``grouped``, as PAT does), a larger batch costs no prefix
        anything. Rules that keep it from growing are of no use, and those that learn find that out.
        """
        if self.stop is StoppingRule.BANDIT:
            return Bandit()
        return Heuristic() if self.stop is StoppingRule.HEURISTIC and kernel != GROUPED else Always()
