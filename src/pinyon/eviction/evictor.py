"""The eviction of a pool of keys: an exchangeable policy, and the work that every policy shares."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

import numpy as np

from pinyon.eviction.fit import Fit
from pinyon.eviction.interface import (
    EvictionPolicy,
    Key,
    KnownOf,
    LearningEviction,
    Pinning,
    Refit,
    Traits,
    at_once,
    hand_over,
    learner,
)
from pinyon.eviction.ranked import Ranked


class Rows(NamedTuple):
    """A fit as plain numbers, for journals; its policy uses an array."""

    values: Sequence[Sequence[float]]


class Regrets(NamedTuple):
    """The keys that came back before as many others as are held were evicted: twice the room would have kept most."""

    keys: int
    seconds: float
    """The sum of the times from eviction to return."""


class Evictor(Generic[Key]):
    """The evictor of one pool.

    Its calls are those of :class:`pinyon.eviction.interface.EvictionPolicy`, and O(keys) besides the policy's own cost.
    Keys that waiting requests *want* are spared ("KVCache cache in the wild" §4.1): they go only when nothing else may,
    the deepest first. Until then the policy sees them as pinned, while all others see them as keys that may go.

    The evictor remembers when it evicted each key, for as many keys as were held at the last eviction."""

    def __init__(self, policy: EvictionPolicy[Key], refit: Refit = at_once, spared_max: int = 0) -> None:
        """Takes the pool's policy, and ``refit``, which has the work of a learning policy done."""
        self._policy = policy
        self._pinning: Pinning | None = policy if isinstance(policy, Pinning) else None
        self._refit = refit
        self._learn = learner(policy, self._refit_plainly)
        self.spared_max = spared_max
        """The greatest number of keys wanted at once; 0 turns sparing off."""
        self._wanted: dict[Key, tuple[int, int]] = {}
        """The number of requests that want each key, held or not, and its place in the first request's prompt."""
        self._spared: Ranked[Key] = Ranked()
        """The wanted keys that are held and not pinned by others."""
        self._number = 0
        self._now_s = 0.0
        self._held = 0
        self._ghosts: OrderedDict[Key, float] = OrderedDict()
        self.evicted = 0
        """The number of keys evicted since the start."""
        self.regrets = Regrets(0, 0.0)
        """The regrets since the start."""

    # -- events

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        self._came(keys, now_s)
        self._policy.stored(keys, now_s, traits, offsets, after)
        if self._wanted:
            self._spare([key for key in keys if key in self._wanted], now_s)

    def stored_pinned(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        """Does what :meth:`stored` and then :meth:`pinned` do."""
        pinning = self._pinning
        if pinning is None or self._wanted:
            self.stored(keys, now_s, traits, offsets, after)
            self.pinned(keys, now_s)
        else:
            self._came(keys, now_s)
            pinning.stored_pinned(keys, now_s, traits, offsets, after)

    def _came(self, keys: Sequence[Key], now_s: float) -> None:
        self._now_s = now_s
        self._held += len(keys)
        ghosts = self._ghosts
        if ghosts.keys().isdisjoint(keys):
            return
        number, seconds = self.regrets
        for key in keys:
            went_s = ghosts.pop(key, None)
            if went_s is not None:
                number += 1
                seconds += now_s - went_s
        self.regrets = Regrets(number, seconds)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        self._policy.used(keys, now_s, traits, offsets)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._now_s = now_s
        if self._spared:
            keys = [key for key in keys if not self._spared.take(key)]
        self._policy.pinned(keys, now_s)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._now_s = now_s
        if wanted := self._wanted:
            for key in keys:
                if key in wanted:
                    self._put_spared(key)
            keys = [key for key in keys if key not in wanted]
        self._policy.unpinned(keys, now_s)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        self._held -= len(keys)
        for key in keys if self._spared else ():
            self._spared.take(key)
        self._policy.dropped(keys, now_s)

    # -- what is wanted

    def want(self, keys: Sequence[Key]) -> int:
        """Begins to spare the first keys of a waiting request's prompt; returns how many of them count.

        The first keys count, until :attr:`spared_max` are wanted; the request must pass these to :meth:`unwant`."""
        wanted, policy, fresh = self._wanted, self._policy, []
        for place, key in enumerate(keys):
            known = wanted.get(key)
            if known is not None:
                wanted[key] = (known[0] + 1, known[1])
            elif len(wanted) >= self.spared_max:
                keys = keys[:place]
                break
            else:
                wanted[key] = (1, place)
                if key in policy:
                    fresh.append(key)
        self._spare(fresh, self._now_s)
        return len(keys)

    def unwant(self, keys: Sequence[Key]) -> None:
        """Stops sparing keys whose request has got them or no longer waits; they count as used until now."""
        wanted, freed = self._wanted, []
        for key in keys:
            count, place = wanted[key]
            if count > 1:
                wanted[key] = (count - 1, place)
                continue
            del wanted[key]
            if self._spared.take(key):
                freed.append(key)
        self._policy.unpinned(freed, self._now_s)

    def _spare(self, keys: Sequence[Key], now_s: float) -> None:
        """Begins to spare wanted keys that the policy could have chosen until now."""
        self._policy.pinned(keys, now_s)
        for key in keys:
            self._put_spared(key)

    def _put_spared(self, key: Key) -> None:
        self._number += 1
        self._spared.put(key, (-self._wanted[key][1], self._number))

    # -- what goes

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        """Returns the next victim's worth and the victim; None if the policy lets no key go."""
        return self._policy.peek(now_s)

    def victims(self, count: int, now_s: float) -> list[Key]:
        self._now_s = now_s
        gone = self._policy.victims(count, now_s)
        missing = min(count - len(gone), len(self._spared))
        if missing:
            deepest = [found[1] for _ in range(missing) if (found := self._spared.pop()) is not None]
            self._policy.unpinned(deepest, now_s)
            gone += self._policy.victims(missing, now_s)
        self._went(gone, now_s)
        return gone

    def evict(self, keys: Sequence[Key], now_s: float) -> None:
        """Evicts these keys, whatever the policy would choose; each of them may go."""
        for key in keys if self._spared else ():
            self._spared.take(key)
        self._policy.dropped(keys, now_s)
        self._went(keys, now_s)

    def _went(self, keys: Sequence[Key], now_s: float) -> None:
        ghosts, limit = self._ghosts, self._held
        self.evicted += len(keys)
        self._held -= len(keys)
        for key in keys:
            ghosts[key] = now_s
        while len(ghosts) > limit:
            ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._policy) + len(self._spared)

    def __contains__(self, key: object) -> bool:
        return key in self._policy or key in self._spared

    # -- the policy

    def learn(self, now_s: float) -> None:
        """Lets a learning policy learn when that is due; may be called often."""
        self._learn(now_s)

    def switch(self, policy: EvictionPolicy[Key], pinned: Sequence[Key], known_of: KnownOf[Key], now_s: float) -> None:
        """Replaces the policy, see :func:`hand_over`. Raises ``ValueError`` if the new policy already holds keys."""
        if len(policy):
            raise ValueError("the eviction policy belongs to another pool")
        hand_over(self._policy, policy, [*self._spared, *pinned], known_of, now_s)
        self._policy = policy
        self._pinning = policy if isinstance(policy, Pinning) else None
        self._learn = learner(policy, self._refit_plainly)

    def _refit_plainly(self, work: Callable[[], Any], adopt: Callable[[Any], object]) -> None:
        self._refit(lambda: _plain(work()), lambda fit: adopt(_as_made(fit)))

    def adopt(self, fit: Any) -> None:
        """Applies a fit from now on; the fit must come from the present policy's own work."""
        if isinstance(self._policy, LearningEviction):
            self._policy.adopt(_as_made(fit))

    # -- for people

    @property
    def wanted(self) -> int:
        """The number of wanted keys, held or not."""
        return len(self._wanted)

    def beliefs(self) -> Mapping[str, Fit]:
        """Returns the policy's :meth:`LearningEviction.beliefs`, or none if it does not learn."""
        policy = self._policy
        return policy.beliefs() if isinstance(policy, LearningEviction) else {}


def _plain(fit: Any) -> Any:
    return Rows(fit.tolist()) if isinstance(fit, np.ndarray) else fit


def _as_made(fit: Any) -> Any:
    return np.array(fit.values) if isinstance(fit, Rows) else fit
