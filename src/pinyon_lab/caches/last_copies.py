"""Last copies are worth more than second ones: a choice among the next few victims of a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.eviction.policy import Traits
from pinyon.eviction.runs import runs
from pinyon_lab.caches.cache import Chooser

__all__ = ["LastCopies"]


class LastCopies:
    """Of the next ``look_ahead`` victims of ``policy`` the first one goes that has another copy elsewhere; if none has,
    the first one.

    Those that are passed over keep their order and are next again. To the policy they have gone: what is used meanwhile
    is told to it as stored.
    """

    def __init__(self, policy: Chooser, elsewhere: Callable[[int], bool], look_ahead: int) -> None:
        self._policy = policy
        self._elsewhere = elsewhere
        self._look_ahead = look_ahead
        self._next: dict[int, None] = {}
        """The policy's victims, in their order, that are still held."""

    def stored(
        self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int], after: int | None = None
    ) -> None:
        self._policy.stored(keys, now_s, traits, offsets, after)

    def used(self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int]) -> None:
        for start, end, passed_over in runs(keys, self._next):
            run, at = keys[start:end], offsets[start:end]
            if passed_over:
                self._policy.stored(run, now_s, traits, at, keys[start - 1] if start else None)
                for key in run:
                    del self._next[key]
            else:
                self._policy.used(run, now_s, traits, at)

    def victims(self, count: int, now_s: float) -> list[int]:
        gone: list[int] = []
        while len(gone) < count and (key := self._first(now_s)) is not None:
            del self._next[key]
            gone.append(key)
        return gone

    def _first(self, now_s: float) -> int | None:
        passed_over = self._next
        for key in passed_over:
            if self._elsewhere(key):
                return key
        while len(passed_over) < self._look_ahead and (found := self._policy.victims(1, now_s)):
            passed_over[found[0]] = None
            if self._elsewhere(found[0]):
                return found[0]
        return next(iter(passed_over), None)
