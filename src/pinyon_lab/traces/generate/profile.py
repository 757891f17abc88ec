"""The parts of a workload to be generated. Lengths are in tokens, times in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pinyon_lab.traces.generate.draws import Quantiles

DAY_S = 86_400.0


@dataclass(frozen=True)
class Hours:
    """The course of traffic over the day, from rate ``night`` to 1. At night, people take ``slower`` times as long."""

    night: float = 1.0
    slower: float = 1.0
    workdays_differ: float = 0.0
    """The share by which a day's rate may differ from another's."""

    def rate(self, time_of_day_s: float) -> float:
        """Returns the rate between ``night`` and 1: lowest at 4:00, high from 10:00 to 21:00."""
        hour = time_of_day_s / 3600.0 % 24.0
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * (hour - 4.0) / 24.0)
        return self.night + (1.0 - self.night) * min(1.0, 2.0 * wave)

    def slowness(self, time_of_day_s: float) -> float:
        """Returns the factor on people's times; 1 where the rate is 1."""
        if self.night >= 1.0:
            return 1.0
        return 1.0 + (self.slower - 1.0) * (1.0 - self.rate(time_of_day_s)) / (1.0 - self.night)


@dataclass(frozen=True)
class UserGroups:
    """The users, group by group. The ``points`` are (share of the users, the busiest first; share of the requests that
    they send), rising to (1, 1). Within a group the first user sends ``steepness`` times as much as the last,
    geometrically between. The first of the next group may send more than that last one."""

    number: int
    points: tuple[tuple[float, float], ...]
    steepness: float

    def weights(self) -> list[float]:
        """Returns each user's share of the requests. Raises ``ValueError`` for an empty or an incomplete last group."""
        result: list[float] = []
        last_sent, count = 0.0, self.number
        for share, sent in self.points:
            members = max(1, round(share * count) - len(result)) if share < 1 else count - len(result)
            if members <= 0:
                raise ValueError(f"{count} users are too few for {self.points}")
            ratio = self.steepness ** (-1.0 / members)
            group = [ratio**rank for rank in range(members)]
            scale = (sent - last_sent) / sum(group)
            result.extend(scale * each for each in group)
            last_sent = sent
        if self.points[-1] != (1, 1):
            raise ValueError(f"the last group is not all users: {self.points}")
        return result


@dataclass(frozen=True)
class Chats:
    """Conversations of people, in which each prompt is the last one with its answer and something new."""

    kind: str
    share: float
    """The share of all requests."""
    again_first: float
    """The probability of a second turn, over all users."""
    again_later: float
    """The probability of one more turn after that."""
    long_share: float
    """The share of conversations with a second turn that go on with ``long_again``."""
    long_again: float
    """The probability of one more turn in long conversations."""
    first: Quantiles
    """The length of the first prompt without the application's instructions."""
    more: Quantiles
    """The tokens that a later turn adds."""
    output: Quantiles
    think_s: float
    """The mean time to the next turn, which is exponential."""
    think_later: float
    """The factor on that time after the second and later turns."""
    spread: float = 0.0
    """The sigma of the logarithm of a conversation's own factor on what its turns add; mean 1."""
    system_tokens: int = 0
    """The length of the instructions that the application puts before all conversations of this kind."""
    system_life_s: float = math.inf
    """The time after which these instructions change."""
    system_known: float = 1.0
    """The share of conversations that begin with them."""
    context_max: int = 26_624
    """The limit of prompts; longer ones lose the older half of the conversation."""


@dataclass(frozen=True)
class Programs:
    """Programs that call an API. Each job is a series of calls with the same instructions and something of its own."""

    kind: str
    share: float
    """The share of all requests."""
    calls: Quantiles
    """The number of calls of a job."""
    per_s: Quantiles
    """The calls per second of a job."""
    tokens: Quantiles
    """The length of a program's prompts, around which its calls spread; of shared programs, what a call adds."""
    fixed: tuple[float, float]
    """The share of a prompt that is instructions: from, to."""
    output: Quantiles
    life_s: float = math.inf
    """The time after which a program has other instructions."""
    head_users: float = 0.0
    """The share of users, the busiest ones, whose prompts are longer."""
    head_longer: float = 1.0
    """The factor by which they are longer."""
    same: float = 0.0
    """The share of calls whose text was asked before."""
    same_after_s: Quantiles | None = None
    """The time since that text was asked."""
    second_turn: float = 0.0
    """The share of calls with a second turn."""
    hot: tuple[tuple[float, int], ...] = ()
    """The programs that all users share: ``(share of these calls, blocks of instructions)``."""


@dataclass(frozen=True)
class Profile:
    """A workload of ``per_s`` requests at a day's busiest time, on average, from ``start_s`` after midnight on."""

    name: str
    format: str
    per_s: float
    duration_s: float
    start_s: float
    hours: Hours
    users: UserGroups
    parts: tuple[Chats | Programs, ...]
    chatty_users: float = 0.0
    """The share of users who have a second turn more often."""
    chatty_more: float = 1.0
    """The factor by which they do, at most 1 / ``chatty_users``."""
    warm_up_s: float = 3600.0
    """The time before the start at which generation begins, so that conversations and jobs are under way."""


class Free(NamedTuple):
    """A parameter that nobody published: its usual value and its plausible range."""

    usual: float
    low: float
    high: float
    text: str


class ProfileSpec(NamedTuple):
    """A profile that is made from its free parameters."""

    text: str
    free: Mapping[str, Free]
    make: Callable[[Mapping[str, float]], Profile]
