"""What a workload to be generated consists of. Lengths are in tokens, times in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pinyon_lab.traces.generate.draws import Quantiles

DAY_S = 86_400.0


@dataclass(frozen=True)
class Hours:
    """How traffic changes over the day: ``night`` is the least rate, the greatest is 1; people take ``slower`` times as
    long at night."""

    night: float = 1.0
    slower: float = 1.0
    workdays_differ: float = 0.0
    """Share by which a day's rate may differ from another's."""

    def rate(self, time_of_day_s: float) -> float:
        """Between ``night`` and 1: least at 4:00, high from 10:00 to 21:00."""
        hour = time_of_day_s / 3600.0 % 24.0
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * (hour - 4.0) / 24.0)
        return self.night + (1.0 - self.night) * min(1.0, 2.0 * wave)

    def slowness(self, time_of_day_s: float) -> float:
        """1 where the rate is 1."""
        if self.night >= 1.0:
            return 1.0
        return 1.0 + (self.slower - 1.0) * (1.0 - self.rate(time_of_day_s)) / (1.0 - self.night)


@dataclass(frozen=True)
class UserGroups:
    """See :func:`pinyon_lab.traces.generate.source.weights`."""

    number: int
    points: tuple[tuple[float, float], ...]
    steepness: float


@dataclass(frozen=True)
class Chats:
    """Conversations of people: each turn's prompt is the last one's with its answer and something new."""

    kind: str
    share: float
    """Of all requests."""
    again_first: float
    """Probability of a second turn, over all users."""
    again_later: float
    """And of one more after that."""
    long_share: float
    """Of the conversations that have a second turn, those that go on and on,"""
    long_again: float
    """with this probability."""
    first: Quantiles
    """Of the first prompt, without what the application puts before it."""
    more: Quantiles
    """That a later turn adds."""
    output: Quantiles
    think_s: float
    """Mean time to the next turn, exponential,"""
    think_later: float
    """times this after the second and later ones."""
    spread: float = 0.0
    """Sigma of the logarithm of a conversation's own factor on what its turns add; mean 1."""
    system_tokens: int = 0
    """What the application puts before all conversations of this kind."""
    system_life_s: float = math.inf
    """After which that is another one."""
    system_known: float = 1.0
    """Share of the conversations that begin with it."""
    context_max: int = 26_624
    """Prompts that would be longer lose the older half of the conversation."""


@dataclass(frozen=True)
class Programs:
    """Programs that call an API: each job is a series of calls with the same instructions and something of its own."""

    kind: str
    share: float
    """Of all requests."""
    calls: Quantiles
    """Of a job."""
    per_s: Quantiles
    """Calls of a job."""
    tokens: Quantiles
    """Of a prompt: a program's own, its calls are spread around it; of one that all users share, what a call adds."""
    fixed: tuple[float, float]
    """Share of a prompt that is instructions: from, to."""
    output: Quantiles
    life_s: float = math.inf
    """After which a program has other instructions."""
    head_users: float = 0.0
    """Share of users, the busiest ones, whose prompts are longer"""
    head_longer: float = 1.0
    """by this factor."""
    same: float = 0.0
    """Share of calls whose text was asked before,"""
    same_after_s: Quantiles | None = None
    """that long before."""
    second_turn: float = 0.0
    """Share of calls that are followed up."""
    hot: tuple[tuple[float, int], ...] = ()
    """(share of these calls, blocks of instructions) of programs that all users share."""


@dataclass(frozen=True)
class Profile:
    """A workload: ``per_s`` requests on average of a day's busiest time, from ``start_s`` after midnight on."""

    name: str
    format: str
    per_s: float
    duration_s: float
    start_s: float
    hours: Hours
    users: UserGroups
    parts: tuple[Chats | Programs, ...]
    chatty_users: float = 0.0
    """Share of users who go on talking more often,"""
    chatty_more: float = 1.0
    """by this factor, at most 1 / ``chatty_users``."""
    warm_up_s: float = 3600.0
    """What began that long before is under way already."""


class Free(NamedTuple):
    """A parameter that nobody published: its usual value and the range in which it may well lie."""

    usual: float
    low: float
    high: float
    text: str


class ProfileSpec(NamedTuple):
    """How a profile is made from its free parameters."""

    text: str
    free: Mapping[str, Free]
    make: Callable[[Mapping[str, float]], Profile]
