"""The workload-aware policy of "KVCache cache in the wild" §4.2.

A block's priority is (ReuseProb_w(t, life), -offset), lexicographic; the least goes first. w is the category of the
request that used the block last, t the time since then. ReuseProb is the probability that the block is used again
within [t, t + life]. It is the mass there, not conditioned on survival: conditioned, an exponential would be constant,
and the order would vanish.

For each category, the distribution is p * (1 - exp(-t / tau)), fitted to recent samples. p is the share of blocks that
were used again, tau their mean time until then. The probability falls with t, so in each category the block that was
used longest ago is the only candidate (Fig. 24 and "Performance optimization"). That costs O(W) for W categories each
time that room is made, and O(log W) for each block that goes then, as all are judged at one time.

Where samples are too few, fits of the same hour of an earlier day may stand in (appendix A.1).

The paper does not say what *life* is; hit ratios depend on it. Frequency is not used."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Generic

from pinyon.core.policies import check_bounds
from pinyon.eviction.day_fits import NO_FITS, DayFits
from pinyon.eviction.fit import PRIOR, UNKNOWN, Fit, Sums, fitted
from pinyon.eviction.interface import Key, Traits, kind_and_turn
from pinyon.eviction.ranked import Ranked

CATEGORIES_MAX = 256
"""The limit of categories, as clients name them; further ones count as unknown until some are forgotten."""
TURNS_MAX = 32
"""The last turn with its own category; later turns share one per kind, lest one long conversation fill them all."""
FORGOTTEN = 0.5
"""A category without held blocks is forgotten when its samples have faded to less than this."""


@dataclass(frozen=True, slots=True)
class WorkloadAwareSettings:
    """The policy's options.

    ``life_s`` is the expected lifespan, 0 for none. If ``fitted`` is false, nothing is fitted to samples; without
    ``fits``, all categories then have one distribution. Samples fade with ``window_s``; fits are renewed every
    ``refit_s``. ``fits`` are an earlier day's (appendix A.1); ``midnight_s`` is the clock's value at some midnight."""

    life_s: float = 60.0
    fitted: bool = True
    window_s: float = 1800.0
    refit_s: float = 10.0
    fits: DayFits = NO_FITS
    midnight_s: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, life_s=(0, 1e9), window_s=(1e-3, 1e9), refit_s=(1e-3, 1e9), midnight_s=(-1e12, 1e12))


_Candidate = tuple[tuple[float, int, int], str, Key]
"""Priority, category and key. No two priorities are equal, as they end in a unique number."""


class _HeldBlock:
    __slots__ = ("category", "last_s", "pinned", "place")

    def __init__(self, category: str, last_s: float, place: int) -> None:
        self.category = category
        self.last_s = last_s
        self.place = place
        self.pinned = False


class WorkloadAware(Generic[Key]):
    """The policy; a block's worth is its probability of reuse.

    It remembers the last use and category of evicted keys, as many as are held, because a return is a reuse as well."""

    def __init__(self, settings: WorkloadAwareSettings) -> None:
        self._settings = settings
        self._life_s = settings.life_s or math.inf
        self._held: dict[Key, _HeldBlock] = {}
        self._pinned = 0
        self._queues: dict[str, Ranked[Key]] = {}
        self._ghosts: OrderedDict[Key, tuple[str, float]] = OrderedDict()
        self._sums: dict[str, list[float]] = {}
        self._faded_s = math.inf
        self._number = 0
        self._refit_at_s = -math.inf
        self.fits: Mapping[str, Fit] = {UNKNOWN: PRIOR}
        """The fits by category; ``""`` is for all that are not named."""

    # -- what happens

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        category = self._category(traits.category)
        ghosts, held = self._ghosts, self._held
        for key, offset in zip(keys, offsets, strict=True):
            ghost = ghosts.pop(key, None)
            if ghost is not None:
                self._sample(ghost[0], now_s - ghost[1])
            held[key] = entry = _HeldBlock(category, now_s, offset)
            self._put(key, entry)
        self._sums[category][0] += len(keys)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        held = self._held
        category = None if traits is None else self._category(traits.category)
        for key, offset in zip(keys, offsets, strict=True):
            entry = held[key]
            self._sample(entry.category, now_s - entry.last_s)
            entry.last_s = now_s
            if category is not None:
                if not entry.pinned and entry.category != category:
                    self._queues[entry.category].take(key)
                entry.category, entry.place = category, offset
            if entry.category in self._sums:
                self._sums[entry.category][0] += 1
            if not entry.pinned:
                self._put(key, entry)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            entry = self._held[key]
            entry.pinned = True
            self._queues[entry.category].take(key)
        self._pinned += len(keys)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            entry = self._held[key]
            entry.pinned = False
            entry.last_s = now_s
            entry.category = self._category(entry.category)  # the category may have been forgotten meanwhile
            self._put(key, entry)
        self._pinned -= len(keys)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            entry = self._held.pop(key)
            if entry.pinned:
                self._pinned -= 1
            else:
                self._queues[entry.category].take(key)

    def _category(self, name: str) -> str:
        if name not in self._queues:
            kind, turn = kind_and_turn(name)
            if turn > TURNS_MAX:
                name = f"{kind}/{TURNS_MAX}+"
            if len(self._queues) >= CATEGORIES_MAX and name not in self._queues:
                name = UNKNOWN
            if name not in self._queues:
                self._queues[name] = Ranked()
                self._sums[name] = [0.0, 0.0, 0.0]
        return name

    def _put(self, key: Key, entry: _HeldBlock) -> None:
        self._number += 1
        self._queues[entry.category].put(key, (entry.last_s, -entry.place, self._number))

    def _sample(self, category: str, seconds: float) -> None:
        sums = self._sums.get(category)
        if sums is not None:  # the category is not forgotten
            sums[1] += 1
            sums[2] += seconds

    # -- what goes

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone: list[Key] = []
        candidates = self._candidates(now_s)
        heapify(candidates)
        while len(gone) < count and candidates:
            _, category, key = candidates[0]
            entry = self._held.pop(key)
            self._queues[category].take(key)
            self._remember(key, entry)
            gone.append(key)
            following = self._candidate(category, now_s)
            if following is None:
                heappop(candidates)
            else:
                heapreplace(candidates, following)
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        least = min(self._candidates(now_s), default=None)
        return None if least is None else (least[0][0], least[2])

    def _candidates(self, now_s: float) -> list[_Candidate[Key]]:
        """Returns the candidate of each category that has one."""
        found = (self._candidate(category, now_s) for category in self._queues)
        return [each for each in found if each is not None]

    def _candidate(self, category: str, now_s: float) -> _Candidate[Key] | None:
        head = self._queues[category].first()
        if head is None:
            return None
        (last_s, depth, number), key = head
        fit = self.fits.get(category) or self.fits[UNKNOWN]
        return (fit.mass(max(0.0, now_s - last_s), self._life_s), depth, number), category, key

    def _remember(self, key: Key, entry: _HeldBlock) -> None:
        self._ghosts[key] = (entry.category, entry.last_s)
        while len(self._ghosts) > len(self._held) + 1:
            self._ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._held) - self._pinned

    def __contains__(self, key: object) -> bool:
        entry = self._held.get(key)  # type: ignore[arg-type]
        return entry is not None and not entry.pinned

    # -- what is learned

    def refit(self, now_s: float) -> Callable[[], Mapping[str, Fit]] | None:
        """Returns work for any thread that makes new fits for :meth:`adopt`; None if it is too early."""
        settings = self._settings
        if not (settings.fitted or settings.fits) or now_s < self._refit_at_s:
            return None
        self._refit_at_s = now_s + settings.refit_s
        earlier = settings.fits.at(now_s - settings.midnight_s)
        if not settings.fitted:
            return lambda: {UNKNOWN: PRIOR, **earlier}
        fade = math.exp(min(0.0, self._faded_s - now_s) / settings.window_s)  # no fading the first time
        self._faded_s = now_s
        for sums in self._sums.values():
            sums[:] = [each * fade for each in sums]
        for category in [each for each, sums in self._sums.items() if sums[0] + sums[1] < FORGOTTEN]:
            if not self._queues[category]:
                del self._queues[category], self._sums[category]
        samples = {category: Sums(*sums) for category, sums in self._sums.items()}
        return lambda: {UNKNOWN: PRIOR, **earlier, **fitted(samples)}

    def adopt(self, fits: Mapping[str, Fit]) -> None:
        self.fits = fits

    def beliefs(self) -> Mapping[str, Fit]:
        return self.fits
