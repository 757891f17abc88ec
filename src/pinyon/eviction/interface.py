"""The interface of eviction policies, and the facts about requests that they receive.

A policy is told at once what happens to the held keys. They are *stored*, *used* by a request, *pinned* while their
blocks are read or written, *unpinned*, or *dropped* for another reason than eviction. It is asked which keys to evict.
It knows keys, never where their blocks are, so it recognises a key that comes back. Clock values are arguments.

Besides its order, a key has :class:`Traits`: those of the request that stored or used it last. From them, policies
learn what becomes of a kind of request ("KVCache cache in the wild" §4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.eviction.fit import Fit

Key = TypeVar("Key", bound=Hashable)


class Traits(NamedTuple):
    """The known traits of the request that stored or used a key."""

    category: str = ""
    """The request's kind and turn; empty = unknown."""
    tenant: str = ""
    """The request's tenant; empty = unknown."""

    @classmethod
    def of(cls, request: RequestClass) -> Traits:
        return cls(request.category, request.tenant)


NO_TRAITS = Traits()


def kind_and_turn(category: str) -> tuple[str, int]:
    """Returns kind and turn of a category such as ``text/3``; the turn is 0 if the category names none."""
    kind, _, turn = category.rpartition("/")
    return (kind, int(turn)) if turn.isdecimal() and len(turn) < 10 else (category, 0)


class Use(NamedTuple):
    """A request's use of keys: its traits (None if unknown), and the first key's place in its prompt, in blocks."""

    traits: Traits | None = None
    first: int = 0

    @classmethod
    def of(cls, request: RequestClass, first: int = 0) -> Use:
        return cls(None if request == UNKNOWN_CLASS else Traits.of(request), first)


@runtime_checkable
class LearningEviction(Protocol):
    """The further methods of policies that learn."""

    def refit(self, now_s: float) -> Callable[[], Any] | None:
        """Returns work on recent samples for any thread, with a result for :meth:`adopt`; None if it is too early."""

    def adopt(self, fit: Any) -> None:
        """Applies what was learned from now on."""

    def beliefs(self) -> Mapping[str, Fit]:
        """Returns the policy's fit of each category, for people and metrics; ``""`` is for all that are not named."""


Refit = Callable[[Callable[[], Any], Callable[[Any], object]], None]
"""A function that has work done in any thread. The policy's owner passes the result to the second argument, or not."""


def at_once(work: Callable[[], Any], adopt: Callable[[Any], object]) -> None:
    """Does the work at once, as in replays and tests, which have to run the same way every time."""
    adopt(work())


def learner(policy: object, refit: Refit = at_once) -> Callable[[float], None]:
    """Returns a function that lets a learning policy learn when that is due; call it often, with the time."""
    if not isinstance(policy, LearningEviction):
        return lambda now_s: None
    learning = policy

    def learn(now_s: float) -> None:
        work = learning.refit(now_s)
        if work is not None:
            refit(work, learning.adopt)

    return learn


class EvictionPolicy(Protocol[Key]):
    """A policy that chooses victims among the keys that it is told of.

    The keys of one call are in the order of their prompt, each once; ``offsets`` are their places in it, in blocks.
    Where a policy has no preference, keys deeper in their prompt go first: a block is useless without those before it.
    Pinned keys never go. Calls cost O(keys), unless a policy says otherwise about its victims.

    A policy is not told for how many keys there is room, and cannot count on an order of :meth:`victims` and
    :meth:`stored`. A service makes room first, and then stores the keys that got a block. A replay stores all of a
    request's keys and then evicts the excess, so keys that were stored just now may go."""

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        """Adds keys, none of which was held. ``after`` is the key before the first one in its prompt; None if there is
        none or it is unknown."""

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        """Notes that a request uses held keys, pinned ones among them. ``traits`` are the request's; None if unknown:
        the keys keep theirs."""

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        """Pins keys, which are held and not pinned: they must not go."""

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        """Releases pinned keys: they may go again."""

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        """Removes keys, pinned or not."""

    def victims(self, count: int, now_s: float) -> list[Key]:
        """Removes and returns the keys to evict next, in this order, at most ``count``."""

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        """Returns the next victim's worth and the victim; None if no key may go.

        If one policy manages several pools, the pool whose next victim is worth least should evict."""

    def __len__(self) -> int:
        """Returns how many keys may go."""

    def __contains__(self, key: object) -> bool:
        """Returns whether the key is held and may go."""


@runtime_checkable
class Chaining(Protocol):
    """The further method of policies that use which key follows which."""

    def follows(self, key: Any, after: Any, now_s: float) -> None:
        """Notes that ``after`` is the key before ``key`` in its prompt; both are held, and unused since being stored.

        A call of ``stored`` began with ``key``, and another one ended with ``after``."""


@runtime_checkable
class Pinning(Protocol):
    """The further method of policies that save work if keys whose blocks are yet to be written are pinned at once."""

    def stored_pinned(
        self, keys: Sequence[Any], now_s: float, traits: Traits, offsets: Sequence[int], after: Any = None
    ) -> None:
        """Does what ``stored`` and then ``pinned`` do."""


class Known(NamedTuple):
    """Facts about a held key, for a policy that takes over."""

    traits: Traits = NO_TRAITS
    """The traits of the request that stored the key or used it last."""
    place: int = 0
    """The key's place in the prompt that it was stored for, in blocks."""
    after: Any = None
    """The key before this one in that prompt; None if there is none or it is unknown."""


KnownOf = Callable[[Key], Known]


def hand_over(
    last: EvictionPolicy[Key], new: EvictionPolicy[Key], pinned: Sequence[Key], known_of: KnownOf[Key], now_s: float
) -> None:
    """Hands all keys of ``last`` over to ``new``; ``last`` is of no use afterwards.

    ``new`` is told of the keys in the order in which ``last`` would evict them, then of the ``pinned`` keys. Each key
    counts as used now by the request known to have used it last. Then ``new`` is told which key follows which."""
    keys = [*last.victims(len(last), now_s), *pinned]
    known = {key: known_of(key) for key in keys}
    # Places fall along a chain, so that each chain ends even if callers gave wrong predecessors.
    before = {
        key: after
        for key, (_, place, after) in known.items()
        if after is not None and after in known and known[after].place == place - 1
    }
    extended, fixed = Counter(before.values()), set(pinned)
    runs: list[list[Key]] = []  # each with the deepest key first; no other run begins within it
    for key in keys:
        deeper = runs[-1][-1] if runs else None
        follows = deeper is not None and before.get(deeper) == key and extended[key] == 1
        if follows and known[key].traits == known[deeper].traits and (key in fixed) == (deeper in fixed):  # type: ignore[index]
            runs[-1].append(key)
        else:
            runs.append([key])
    for run in runs:
        run.reverse()
        new.stored(run, now_s, known[run[0]].traits, [known[key].place for key in run])
    new.pinned(pinned, now_s)
    if isinstance(new, Chaining):
        for run in runs:
            if (after := before.get(run[0])) is not None:
                new.follows(run[0], after, now_s)
