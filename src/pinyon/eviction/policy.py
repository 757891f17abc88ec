"""What an eviction policy is told and asked, whoever asks.

It is told what happens to the keys that are held, as it happens: they are *stored*, *used* by a request, *pinned* while
somebody reads or writes them, *unpinned*, *dropped* for another reason than eviction. It is asked which ones go. It
knows keys, never where their content is, so that it can recognise one that comes back. Clock values are arguments.

What is known of a key besides its order are :class:`Traits`, those of the request that stored or used it last: the seam
for policies that learn what becomes of a kind of request ("KVCache cache in the wild" §4.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from pinyon.core.request import UNKNOWN_CLASS, RequestClass

Key = TypeVar("Key", bound=Hashable)


class Traits(NamedTuple):
    """What is known of the request that a key was stored or used for."""

    category: str = ""
    """Of the request: kind and turn; empty = unknown."""
    tenant: str = ""
    """Whose it is; empty = unknown."""

    @classmethod
    def of(cls, request: RequestClass) -> Traits:
        return cls(request.category, request.tenant)


NO_TRAITS = Traits()


def kind_and_turn(category: str) -> tuple[str, int]:
    """Of ``text/3``; turn 0: it says none."""
    kind, _, turn = category.rpartition("/")
    return (kind, int(turn)) if turn.isdecimal() and len(turn) < 10 else (category, 0)


class Use(NamedTuple):
    """By a request: its traits (None: nobody knows), and the place in its prompt of the first key."""

    traits: Traits | None = None
    first: int = 0

    @classmethod
    def of(cls, request: RequestClass, first: int = 0) -> Use:
        return cls(None if request == UNKNOWN_CLASS else Traits.of(request), first)


class Belief(NamedTuple):
    """What a policy takes for true of the blocks of one category."""

    share: float
    """Of them that are used again, in [0, 1]."""
    mean_s: float
    """Until then, of those."""


@runtime_checkable
class Learning(Protocol):
    """What policies that learn have besides."""

    def refit(self, now_s: float) -> Callable[[], Any] | None:
        """Work on what was sampled lately, for any thread; its result is for :meth:`adopt`. None: not now."""

    def adopt(self, fit: Any) -> None:
        """What was learned holds from now on."""

    def beliefs(self) -> Mapping[str, Belief]:
        """By category (``""``: of all that has no belief of its own), for people and metrics."""


Refit = Callable[[Callable[[], Any], Callable[[Any], object]], None]
"""Has work done, anywhere, and its result handed to the second by the policy's owner, or forgets about it."""


def at_once(work: Callable[[], Any], adopt: Callable[[Any], object]) -> None:
    """Here and now: what replays and tests have, and what is the same every time."""
    adopt(work())


def learner(policy: object, refit: Refit = at_once) -> Callable[[float], None]:
    """What has a policy learn, called with the time, as often as one likes; of others nothing."""
    if not isinstance(policy, Learning):
        return lambda now_s: None
    learning = policy

    def learn(now_s: float) -> None:
        work = learning.refit(now_s)
        if work is not None:
            refit(work, learning.adopt)

    return learn


class EvictionPolicy(Protocol[Key]):
    """Keys of one call are in the order of their prompt, each once; ``offsets`` are their places in it, in blocks.

    Where a policy has no opinion, what is deeper in its prompt goes first: a block without those before it is of no
    use. Nothing that is pinned goes. Calls cost O(keys), but for what a policy says of its victims.
    """

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        """These are held from now on; none of them was. ``after``: the key before the first one in its prompt; None:
        there is none, or nobody knows."""

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        """A request uses these, which are held. ``traits`` are its; None: nobody knows, they stay as they are."""

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        """These, which are held and not pinned, must not go."""

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        """These, which are pinned, may go again."""

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        """These are not held any more; pinned or not."""

    def victims(self, count: int, now_s: float) -> list[Key]:
        """Those that should go next, at most ``count``, in this order; they are not held any more."""

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        """The next victim and what it is worth, for a choice between pools of one policy: less is to go rather. None:
        nothing may go."""

    def __len__(self) -> int:
        """How many may go."""

    def __contains__(self, key: object) -> bool:
        """It is held and may go."""


@runtime_checkable
class Chaining(Protocol):
    """What policies that go by what extends what have besides."""

    def follows(self, key: Any, after: Any, now_s: float) -> None:
        """``after`` is the key before this one in its prompt. Both are held; with this one a call of ``stored`` began,
        with the other one such a call ended, and nobody has used them since."""


@runtime_checkable
class Pinning(Protocol):
    """What policies have besides to which it is less work that keys are stored by somebody who writes them still."""

    def stored_pinned(
        self, keys: Sequence[Any], now_s: float, traits: Traits, offsets: Sequence[int], after: Any = None
    ) -> None:
        """As ``stored`` and then ``pinned``."""


class Known(NamedTuple):
    """Of a key that is held, for a policy that takes over."""

    traits: Traits = NO_TRAITS
    """Of the request that stored it, or of the last one that used it."""
    place: int = 0
    """In the prompt that it was stored for."""
    after: Any = None
    """The key before it there; None: there is none, or nobody knows."""


KnownOf = Callable[[Key], Known]


def hand_over(
    last: EvictionPolicy[Key],
    new: EvictionPolicy[Key],
    pinned: Sequence[Key],
    known_of: KnownOf[Key],
    now_s: float,
) -> None:
    """Tell ``new`` of all that ``last`` has: in the order in which that would have them go, as used now by the requests
    that are known of them, then of what is ``pinned``; then which follows which. ``last`` is of no use then.
    """
    keys = [*last.victims(len(last), now_s), *pinned]
    known = {key: known_of(key) for key in keys}
    # Places fall along a chain, so that it ends, whatever those who stored it said.
    before = {
        key: after
        for key, (_, place, after) in known.items()
        if after is not None and after in known and known[after].place == place - 1
    }
    extended, fixed = Counter(before.values()), set(pinned)
    runs: list[list[Key]] = []  # the deepest key first; nothing else begins in the middle
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
