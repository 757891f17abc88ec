"""Whom a pool of keys tells and asks: a policy that may be exchanged, and what is the same under all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

from pinyon.eviction.policy import (
    Belief,
    EvictionPolicy,
    Key,
    Learning,
    Refit,
    Traits,
    at_once,
    hand_over,
    learner,
)

__all__ = ["Evictor", "Regrets"]


class Regrets(NamedTuple):
    """Of keys that came back before as many had gone after them as are held: twice the room would have kept most."""

    keys: int
    seconds: float
    """From going to coming back, together."""


class Evictor(Generic[Key]):
    """Calls are those of :class:`pinyon.eviction.policy.EvictionPolicy`, and O(keys) beside the policy's own cost.

    Of what went it remembers when, of as many keys as were held at the last eviction.
    """

    def __init__(self, policy: EvictionPolicy[Key], refit: Refit = at_once) -> None:
        """``refit``: how a policy that learns has its work done."""
        self._policy = policy
        self._refit = refit
        self._learn = learner(policy, refit)
        self._held = 0
        self._ghosts: OrderedDict[Key, float] = OrderedDict()
        self._evicted = 0
        self._regretted, self._regretted_s = 0, 0.0

    # -- what happens

    def stored(self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int]) -> None:
        self._held += len(keys)
        if ghosts := self._ghosts:
            for key in keys:
                went_s = ghosts.pop(key, None)
                if went_s is not None:
                    self._regretted += 1
                    self._regretted_s += now_s - went_s
        self._policy.stored(keys, now_s, traits, offsets)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        self._policy.used(keys, now_s, traits, offsets)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._policy.pinned(keys, now_s)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._policy.unpinned(keys, now_s)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        self._held -= len(keys)
        self._policy.dropped(keys, now_s)

    # -- what goes

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone = self._policy.victims(count, now_s)
        self._went(gone, now_s)
        return gone

    def evict(self, keys: Sequence[Key], now_s: float) -> None:
        """These, which may go, go whatever the policy would choose."""
        self._policy.dropped(keys, now_s)
        self._went(keys, now_s)

    def _went(self, keys: Sequence[Key], now_s: float) -> None:
        ghosts, limit = self._ghosts, self._held
        self._evicted += len(keys)
        self._held -= len(keys)
        for key in keys:
            ghosts[key] = now_s
        while len(ghosts) > limit:
            ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, key: object) -> bool:
        return key in self._policy

    # -- the policy

    def learn(self, now_s: float) -> None:
        """A moment at which a policy that learns may: as often as one likes."""
        self._learn(now_s)

    def switch(
        self,
        policy: EvictionPolicy[Key],
        pinned: Sequence[Key],
        known_of: Callable[[Key], tuple[Traits, int]],
        now_s: float,
    ) -> None:
        """From now on this one chooses, see :func:`hand_over`. Raises ``ValueError`` if it holds something."""
        if len(policy):
            raise ValueError("the eviction policy belongs to another pool")
        hand_over(self._policy, policy, pinned, known_of, now_s)
        self._policy = policy
        self._learn = learner(policy, self._refit)

    def adopt(self, fit: Any) -> None:
        """What the policy learned holds from now on; it is the one whose work that was."""
        if isinstance(self._policy, Learning):
            self._policy.adopt(fit)

    # -- for people

    @property
    def evicted(self) -> int:
        """Keys, since the start."""
        return self._evicted

    @property
    def regrets(self) -> Regrets:
        """Since the start."""
        return Regrets(self._regretted, self._regretted_s)

    def beliefs(self) -> Mapping[str, Belief]:
        """See :meth:`Learning.beliefs`; nothing of a policy that does not learn."""
        policy = self._policy
        return policy.beliefs() if isinstance(policy, Learning) else {}
