"""The decision when to add instances, and when to remove one (DualMap §3.4, A.3.3).

Instances are added where first tokens are not in time, or all instances are overloaded. Many are added at once, since
one would not work off a queue that has built up. They are removed one by one, while those that stay would be idle
enough. Both go by predictions, as those come before anybody has waited. The paper prints no rule; these bounds are
ours."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pinyon.core.errors import InvalidArgument
from pinyon.core.policies import check_bounds

INSTANCES_MAX = 4096
DIGITS_MAX = 9
PARTS, PARTS_MAX = 32, 4096
"""Parts of the shorter window, in which placements are added up: looking back costs the same at any rate."""
SAMPLES_MIN = 20
"""Fewer placements in a window tell nothing."""


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """The bounds, for ``least`` to ``most`` instances; times in seconds."""

    least: int
    most: int
    slo_s: float = 5.0
    """The TTFT SLO of requests that name none."""
    share: float = 0.9
    """The share of the placements that should be in time."""
    overload: float = 0.5
    """The mean work of instances, as a share of the SLO, beyond which they are overloaded."""
    grow: float = 1.0
    """Instances added at once, for each that there is; at least one."""
    idle: float = 0.5
    """The largest share of their time that the remaining instances would compute prompts, for one to be removed."""
    hold_s: float = 10.0
    """The time for which overload must last before instances are added: a burst is over before they are there."""
    window_s: float = 30.0
    """The window of placements that is looked at before instances are added."""
    idle_window_s: float = 120.0
    """The window that is looked at before one is removed."""
    settle_s: float = 60.0
    """The time without decisions after instances were added: they have to come, and queues to be worked off."""
    between_s: float = 30.0
    """The time from one removal to the next."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least and most must be 1 <= least <= most, got {self.least} and {self.most}")
        check_bounds(self, slo_s=(1e-6, 1e6), share=(0, 1), overload=(0, 1e6), grow=(0, 64), idle=(0, 1))
        check_bounds(self, hold_s=(0, 1e6), window_s=(1e-3, 1e6), idle_window_s=(1e-3, 1e6))
        check_bounds(self, settle_s=(0, 1e6), between_s=(0, 1e6))


def parse_sizes(text: str) -> tuple[int, int] | None:
    """Returns the numbers of ``LEAST-MOST``; None for an empty text. Raises :class:`InvalidArgument`."""
    if not text:
        return None
    least, _, most = text.partition("-")
    numbers = all(each.isdecimal() and len(each) <= DIGITS_MAX for each in (least, most))
    if not (numbers and 1 <= int(least) <= int(most) <= INSTANCES_MAX):
        raise InvalidArgument(f"must be LEAST-MOST as 2-8, up to {INSTANCES_MAX}, got {text!r}", field="sizes")
    return int(least), int(most)


@dataclass(slots=True)
class _Part:
    """Sums over the placements of a short time."""

    began_s: float
    count: int = 0
    in_time: int = 0
    prefill_s: float = 0.0


class Scaler:
    """The scaling of one model's prefill instances: ``placed`` for each request, ``decide`` now and then."""

    def __init__(self, settings: ScalingSettings, now_s: float) -> None:
        self._settings = settings
        self._part_s = min(settings.window_s, settings.idle_window_s) / PARTS
        self._parts: deque[_Part] = deque(maxlen=PARTS_MAX)
        """Parts in order of time, as far back as a window looks."""
        self._settled_s = now_s
        self._since_s = now_s
        """The time since when there are as many instances as now."""
        self._hot_since_s: float | None = None

    def placed(
        self, ttft_s: float, prefill_s: float, now_s: float, slo_s: float = 0.0, own_s: float | None = None
    ) -> None:
        """Adds what was predicted of a request: its TTFT, infinite if it found no place, and its SLO, 0 if it names
        none. ``own_s``: the part of the TTFT that no idle cluster would spare it, where that is not ``prefill_s``. A
        request that is too late by that alone is work for the present instances, and asks for no more of them."""
        if not self._parts or now_s >= self._parts[-1].began_s + self._part_s:
            self._forget(now_s)
            self._parts.append(_Part(now_s))
        part = self._parts[-1]
        part.prefill_s += prefill_s
        slo_s = slo_s or self._settings.slo_s
        if (prefill_s if own_s is None else own_s) <= slo_s:
            part.count += 1
            part.in_time += ttft_s <= slo_s

    def _forget(self, now_s: float) -> None:
        horizon_s = now_s - max(self._settings.window_s, self._settings.idle_window_s)
        while self._parts and self._parts[0].began_s < horizon_s:
            self._parts.popleft()

    def decide(self, queues_s: Sequence[float], now_s: float) -> int:
        """Returns how many instances should be added: -1, 0 or more. ``queues_s``: seconds of work of each."""
        settings, count = self._settings, len(queues_s)
        self._forget(now_s)
        if not self._overloaded(queues_s, now_s):
            self._hot_since_s = None
        elif self._hot_since_s is None:
            self._hot_since_s = now_s
        if count < settings.least:
            return settings.least - count
        if now_s < self._settled_s:
            return 0
        if count < settings.most and self._hot_since_s is not None and now_s - self._hot_since_s >= settings.hold_s:
            self._since_s = now_s
            self._settled_s = now_s + settings.settle_s
            return min(settings.most - count, max(1, math.ceil(settings.grow * count)))
        if count > settings.least and self._hot_since_s is None and self._idle(queues_s, now_s):
            self._since_s = now_s
            return -1
        return 0

    def _overloaded(self, queues_s: Sequence[float], now_s: float) -> bool:
        settings = self._settings
        if queues_s and sum(queues_s) / len(queues_s) > settings.overload * settings.slo_s:
            return True
        recent = [part for part in self._parts if part.began_s >= now_s - settings.window_s]
        count = sum(part.count for part in recent)
        return count >= SAMPLES_MIN and sum(part.in_time for part in recent) < settings.share * count

    def _idle(self, queues_s: Sequence[float], now_s: float) -> bool:
        settings = self._settings
        same_s = now_s - self._since_s
        if same_s < max(self._part_s, settings.between_s) or max(queues_s) > settings.overload * settings.slo_s:
            return False
        span_s = min(settings.idle_window_s, same_s)
        work_s = sum(part.prefill_s for part in self._parts if part.began_s >= now_s - span_s)
        return work_s / span_s < settings.idle * (len(queues_s) - 1)
