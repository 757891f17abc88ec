"""How long messages take between regions, and between which ones none get through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pinyon.core.errors import InvalidArgument

LOCAL_S: Final = 0.0005
"""One way inside a region."""
ROUND_TRIPS_S: Final[Mapping[tuple[str, str], float]] = {("us", "eu"): 0.09, ("us", "asia"): 0.15, ("eu", "asia"): 0.2}
"""There and back. Ours: the paper prints that it is up to 200 ms (§2.1, §2.3)."""
OTHERS_S: Final = 0.15
"""Of regions that are not in the table."""


class Network:
    """``round_trips_s``: between two regions, in any order of the two."""

    def __init__(self, round_trips_s: Mapping[tuple[str, str], float] = ROUND_TRIPS_S) -> None:
        for pair, seconds in round_trips_s.items():
            if not 0 <= seconds <= 60:
                raise InvalidArgument(f"{' and '.join(pair)}: a round trip takes 0 to 60 s, not {seconds}")
        self._trips_s = {frozenset(pair): seconds for pair, seconds in round_trips_s.items()}
        self._cut: set[str] = set()

    def one_way_s(self, one: str, other: str) -> float:
        return LOCAL_S if one == other else self._trips_s.get(frozenset((one, other)), OTHERS_S) / 2

    def round_trip_s(self, one: str, other: str) -> float:
        return 2 * self.one_way_s(one, other)

    def reaches(self, one: str, other: str) -> bool:
        """Messages get through."""
        return one == other or (one not in self._cut and other not in self._cut)

    def cut_off(self, region: str) -> None:
        """From now on nothing gets from it to another one, or back."""
        self._cut.add(region)

    def heal(self, region: str) -> None:
        self._cut.discard(region)
