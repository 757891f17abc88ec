"""The order in which prompts are computed: either those that wait at an instance, or those in progress in a step."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

from pinyon.batching.interface import ServiceOrder, Waiting
from pinyon.core.policies import NoSettings, Registry, check_bounds

LEAST_S = 0.001
"""The least seconds of a turn, whatever was predicted: hardly any engine step is shorter."""
EXAMINED_MAX = 256
STALE_MAX = 64
"""The number of entries for departed prompts above which they are removed; each waiting prompt allows one more."""

What = TypeVar("What")


class _Arrived(Generic[Waiting, What]):
    """Waiting prompts in order of arrival, with the facts that the order needs about them."""

    def __init__(self) -> None:
        self._all: OrderedDict[Waiting, What] = OrderedDict()  # removing the first entry of a dict is slow

    def take(self, waiting: Waiting, now_s: float) -> None:
        self.remove(waiting)

    def remove(self, waiting: Waiting) -> None:
        del self._all[waiting]

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class FifoOrder(_Arrived[Waiting, None]):
    """The order of arrival."""

    name: ClassVar[str] = "fifo"
    short_first: ClassVar[bool] = False

    def add(self, waiting: Waiting, came_s: float, seconds: float, deadline_s: float) -> None:
        self._all[waiting] = None

    def advance(self, waiting: Waiting, seconds: float) -> None:
        """Ignores the progress, which makes no difference."""

    def turns(self, now_s: float) -> Iterator[Waiting]:
        return iter(self._all)


@dataclass(frozen=True, slots=True)
class AgeingSettings:
    """Options of :class:`ShortestInTime`.

    A prompt late by over ``age_s`` goes first; late from its deadline or, if sooner, ``patience_s`` after it came."""

    age_s: float = 10.0
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        check_bounds(self, age_s=(0, 1e6), patience_s=(0, 1e6))


class ShortestInTime(_Arrived[Waiting, tuple[int, float, float, float]]):
    """The shortest prompt whose first token can still be in time; after such prompts, the others in order of arrival.

    Prompts that have been late for long go before all of them. Each call looks at all prompts."""

    name: ClassVar[str] = "shortest_in_time"
    short_first: ClassVar[bool] = True

    def __init__(self, settings: AgeingSettings = AgeingSettings()) -> None:
        """Sets the ages. Each prompt has a number, seconds, a deadline, and the time from which it is late."""
        super().__init__()
        self._age_s, self._patience_s = settings.age_s, settings.patience_s
        self._came = 0

    def add(self, waiting: Waiting, came_s: float, seconds: float, deadline_s: float) -> None:
        self._came += 1
        self._all[waiting] = self._came, seconds, deadline_s, min(deadline_s, came_s + self._patience_s)

    def advance(self, waiting: Waiting, seconds: float) -> None:
        number, left_s, deadline_s, late_s = self._all[waiting]
        self._all[waiting] = number, max(0.0, left_s - seconds), deadline_s, late_s

    def turns(self, now_s: float) -> Iterator[Waiting]:
        return iter(sorted(self._all, key=lambda each: self._rank(each, now_s)))

    def _rank(self, waiting: Waiting, now_s: float) -> tuple[float, int]:
        """Returns the rank of a prompt; the least goes first."""
        number, seconds, deadline_s, late_s = self._all[waiting]
        if now_s - late_s > self._age_s:
            return -1.0, number
        return seconds if now_s + seconds <= deadline_s else math.inf, number


@dataclass(frozen=True, slots=True)
class MostInTimeSettings(AgeingSettings):
    """Options of :class:`MostInTime`, as :class:`AgeingSettings`. Aged prompts get ``aged_share`` of others' time.

    If aged prompts always went first, overload would age all prompts in the end, and none would be in time."""

    age_s: float = 20.0
    aged_share: float = 0.25

    def __post_init__(self) -> None:
        AgeingSettings.__post_init__(self)
        if not 0 < self.aged_share <= 1e6:
            raise ValueError(f"aged_share must be above 0 and at most 1e6, got {self.aged_share}")


class _Prompt(NamedTuple):
    """A prompt, ordered by deadline, then by arrival."""

    deadline_s: float
    number: int
    seconds: float
    late_s: float
    """The time from which the prompt counts as late."""


class MostInTime(Generic[Waiting]):
    """The order with the most prompts in time. Among these, the shortest goes first as far as that makes none late.

    Moore's algorithm (1968) for one machine finds these prompts. It takes prompts by deadline, and whenever one more
    would be late, it leaves out the longest so far. When no prompt can be in time, the late ones follow, in the order
    in which they were found late.

    Prompts that have been late for long are *aged*. They go before all others, as often as their share allows. The next
    aged one goes at the latest when others have had ``1 / aged_share`` times what aged ones had since their last turn.
    A turn counts as at least ``LEAST_S``. If a prompt that is not aged has an unknown length, its turn lasts until the
    next turn. If very many could be in time, only the ``EXAMINED_MAX`` with the first deadlines are looked at."""

    name: ClassVar[str] = "most_in_time"
    short_first: ClassVar[bool] = True

    def __init__(self, settings: MostInTimeSettings = MostInTimeSettings()) -> None:
        self._age_s, self._patience_s = settings.age_s, settings.patience_s
        self._aged_share = settings.aged_share
        self._credit_s = 0.0
        """The time that aged prompts are owed: their share, less what they had. From 0 on, it is their turn."""
        self._unsaid = False
        """True if the last turn was of a prompt, not aged, of unknown length: the clock tells how long it takes."""
        self._now_s = 0.0
        """The last time when turns were asked for."""
        self._came = 0
        self._all: dict[Waiting, _Prompt] = {}
        self._open: list[tuple[_Prompt, Waiting]] = []
        """Prompts that could still be in time when they were last looked at, in order."""
        self._late: OrderedDict[Waiting, None] = OrderedDict()
        """Late prompts, in the order in which they were found late."""
        self._aged: OrderedDict[Waiting, None] = OrderedDict()
        """Prompts that have been late for long (aged), in the order in which they were found so."""
        self._ages: list[tuple[float, int, Waiting]] = []
        """A heap of the times from which prompts count as late, including some prompts that have left."""

    def add(self, waiting: Waiting, came_s: float, seconds: float, deadline_s: float) -> None:
        self._came += 1
        late_s = min(deadline_s, came_s + self._patience_s)
        prompt = self._all[waiting] = _Prompt(deadline_s, self._came, seconds, late_s)
        insort(self._open, (prompt, waiting), key=_prompt_of)
        heapq.heappush(self._ages, (late_s, self._came, waiting))

    def turns(self, now_s: float) -> Iterator[Waiting]:
        self._grow_old(now_s)
        aged, credit_s = list(self._aged), self._credit_s
        left = [each for each in self._open if each[1] not in self._aged]
        late = (waiting for waiting in list(self._late) if waiting not in self._aged)
        at = 0
        while True:
            if at < len(aged) and (credit_s >= 0 or not left):
                waiting = aged[at]
                at += 1
                credit_s -= max(LEAST_S, self._all[waiting].seconds)
            elif left:
                prompt, waiting = left.pop(_shortest_in_time(left[:EXAMINED_MAX], now_s))
                credit_s += self._aged_share * max(LEAST_S, prompt.seconds)
            else:
                break
            if at == len(aged):
                credit_s = 0.0
            yield waiting
        yield from late

    def take(self, waiting: Waiting, now_s: float) -> None:
        self._grow_old(now_s)
        self._charge(waiting, self._all[waiting].seconds)
        self.remove(waiting)

    def advance(self, waiting: Waiting, seconds: float) -> None:
        self._charge(waiting, seconds)
        prompt = self._all[waiting]
        less = self._all[waiting] = prompt._replace(seconds=max(0.0, prompt.seconds - seconds))
        if waiting not in self._late:
            self._open[self._place(prompt)] = less, waiting

    def _charge(self, waiting: Waiting, seconds: float) -> None:
        aged = waiting in self._aged
        self._unsaid = seconds <= 0 and not aged
        if aged:
            self._credit_s -= max(LEAST_S, seconds)
        elif self._aged:  # aged prompts save up no credit while they cannot use it
            self._credit_s = min(0.0, self._credit_s) + self._aged_share * max(LEAST_S, seconds)

    def remove(self, waiting: Waiting) -> None:
        prompt = self._all.pop(waiting)
        self._aged.pop(waiting, None)
        if not self._aged:
            self._credit_s = 0.0
        if waiting in self._late:
            del self._late[waiting]
        else:
            del self._open[self._place(prompt)]
        if len(self._ages) > STALE_MAX + 2 * len(self._all):
            self._ages = [each for each in self._ages if self._number(each[2]) == each[1]]
            heapq.heapify(self._ages)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def _place(self, prompt: _Prompt) -> int:
        return bisect_left(self._open, prompt, key=_prompt_of)

    def _number(self, waiting: Waiting) -> int:
        prompt = self._all.get(waiting)
        return 0 if prompt is None else prompt.number

    def _grow_old(self, now_s: float) -> None:
        """Moves prompts that have become late, or aged, each once. First credits aged prompts for the time since."""
        if self._unsaid and self._aged and self._credit_s < 0 and now_s > self._now_s:
            self._credit_s = min(0.0, self._credit_s + self._aged_share * (now_s - self._now_s))
        self._now_s = now_s
        late = [(each, waiting) for each, waiting in self._open if now_s + each.seconds > each.deadline_s]
        if late:
            self._late.update((waiting, None) for _, waiting in late)
            self._open = [each for each in self._open if each[1] not in self._late]
        while self._ages and now_s - self._ages[0][0] > self._age_s:
            _, number, waiting = heapq.heappop(self._ages)
            if self._number(waiting) == number:
                self._aged[waiting] = None


def _prompt_of(entry: tuple[_Prompt, object]) -> _Prompt:
    return entry[0]


def _shortest_in_time(prompts: Sequence[tuple[_Prompt, object]], now_s: float) -> int:
    """Returns the index of the prompt to compute first; each of them could be in time if it were alone."""
    ends_s = now_s
    longest: list[tuple[float, int]] = []
    left_out: set[int] = set()
    for place, (prompt, _) in enumerate(prompts):
        ends_s += prompt.seconds
        heapq.heappush(longest, (-prompt.seconds, -place))
        if ends_s > prompt.deadline_s:
            less_s, other = heapq.heappop(longest)
            ends_s += less_s
            left_out.add(-other)
    ends_s, slack_s = now_s, math.inf
    chosen = -1
    for place, (prompt, _) in enumerate(prompts):
        if place in left_out:
            continue
        # A shorter prompt goes before those with earlier deadlines if each of them has that much slack.
        if chosen < 0 or (prompt.seconds < prompts[chosen][0].seconds and prompt.seconds <= slack_s):
            chosen = place
        ends_s += prompt.seconds
        slack_s = min(slack_s, prompt.deadline_s - ends_s)
    return chosen


SERVICE_ORDERS: Registry[ServiceOrder[object]] = Registry(
    "service order",
    {
        FifoOrder.name: (NoSettings, lambda _: FifoOrder()),
        ShortestInTime.name: (AgeingSettings, ShortestInTime),
        MostInTime.name: (MostInTimeSettings, MostInTime),
    },
    ServiceOrder,
)
SERVICE_ORDER_DEFAULT = MostInTime.name
"""The default of a worker and of a simulation."""
