"""Prefix similarity of requests: how much of the shorter prompt the other one begins with (SkyWalker §3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from pinyon_lab.simulator.regions.programs import Program, Step

PAIRS = 200_000
"""That are looked at of each kind, at most."""


class Similarities(NamedTuple):
    """In the mean over pairs; -1: there are none."""

    within_user: float
    across_users: float
    across_regions: float


def similarity(one: Step, other: Step, block_tokens: int, skipped: int) -> float:
    """``len(common prefix) / min(len)``, in whole blocks, without the first ``skipped`` tokens: a template that all
    have."""
    shared = 0
    for mine, theirs in zip(one.keys, other.keys, strict=False):
        if mine != theirs:
            break
        shared += 1
    tokens = max(1, min(one.tokens, other.tokens) - skipped)
    return min(1.0, max(0, shared * block_tokens - skipped) / tokens)


def similarities(
    programs: Mapping[str, Sequence[Program]], block_tokens: int, skipped: int, rng: Random
) -> Similarities:
    """Of all requests, by region."""
    everyone = [
        (region, program.user, step) for region, some in programs.items() for program in some for step in program.steps
    ]
    by_user: dict[str, list[Step]] = {}
    for _, user, step in everyone:
        by_user.setdefault(user, []).append(step)
    same = [(one, other) for steps in by_user.values() for place, one in enumerate(steps) for other in steps[:place]]
    if len(same) > PAIRS:
        same = rng.sample(same, PAIRS)
    across: list[float] = []
    far: list[float] = []
    for _ in range(PAIRS):
        (here, user, one), (there, another, other) = rng.choice(everyone), rng.choice(everyone)
        if user != another:
            alike = similarity(one, other, block_tokens, skipped)
            across.append(alike)
            if here != there:
                far.append(alike)
    return Similarities(
        _mean([similarity(one, other, block_tokens, skipped) for one, other in same]), _mean(across), _mean(far)
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -1.0
