"""How many instances a trace needs."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["fewest"]


def fewest(attained: Callable[[int], float], share: float, most: int) -> int | None:
    """Instances that attain ``share``: by doubling, then by halving, so attainment should grow with size; where it does
    not, it is one of the sizes at which it crosses ``share``. Asks for each size once. None: ``most`` are not
    enough."""
    few, many = 0, 1
    while attained(many) < share:
        if many == most:
            return None
        few, many = many, min(2 * many, most)
    while many - few > 1:
        middle = (few + many) // 2
        if attained(middle) >= share:
            many = middle
        else:
            few = middle
    return many
