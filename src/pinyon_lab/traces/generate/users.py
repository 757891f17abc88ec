"""Who sends how much: users by the shares that papers print of the busiest ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from random import Random


def weights(count: int, points: Sequence[tuple[float, float]], steepness: float) -> list[float]:
    """Of ``count`` users, group by group, in all 1. ``points``: (share of the users, the busiest first; share of the
    requests that they send), rising, the last one (1, 1). Within a group the first sends ``steepness`` times what the
    last one does, geometrically between; the first of the next group may send more than that last one. Raises
    ``ValueError``."""
    result: list[float] = []
    last_share, last_sent = 0.0, 0.0
    for share, sent in points:
        members = max(1, round(share * count) - len(result)) if share < 1 else count - len(result)
        if members <= 0:
            raise ValueError(f"{count} users are too few for {points}")
        ratio = steepness ** (-1.0 / members)
        group = [ratio**rank for rank in range(members)]
        scale = (sent - last_sent) / sum(group)
        result.extend(scale * each for each in group)
        last_share, last_sent = share, sent
    if (last_share, last_sent) != (1, 1):
        raise ValueError(f"the last group is not all users: {points}")
    return result


class Users:
    """Picked by weight."""

    def __init__(self, of_each: Sequence[float]) -> None:
        self._until = list(accumulate(of_each))

    def pick(self, rng: Random) -> int:
        return min(bisect_right(self._until, rng.random() * self._until[-1]), len(self._until) - 1)
