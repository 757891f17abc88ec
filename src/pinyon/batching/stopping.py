"""Rules for when a batch is better left as it is: one more request may cost it the shared prefix (FEATHER §4.3).

A decision is rewarded by the decode throughput of the steps after it. Learning rules keep a table by state and action,
and look around where they know little. They look around again when what they know stops being true."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

ADD: Final = 1
STOP: Final = 0
Action = int

LOSS_MAX: Final = 5
"""The heuristic's largest loss, in levels."""
LOSS_MAX_MANY: Final = 7
"""The largest loss where at least :data:`MANY` requests share what is left, in levels."""
MANY: Final = 10
SMALL: Final = 4
"""Requests below which a batch takes any, by the heuristic."""

EXPLORATION: Final = 0.05
"""The paper's c of the bandit, as a share of the mean reward (the paper has 200 tokens/s at some 4,000)."""
MEMORY: Final = 100.0
"""Decisions in a state until what the bandit knows of both its actions has faded to 1/e.

So what was tried long ago is tried again. Else a first reward from other times (a smaller batch of the same bin) could
prevent that for good."""
DOUBT: Final = 1.0
"""Trials of an action that count for the bandit after a shift."""
SCALE_WEIGHT: Final = 0.05
"""Weight of the last reward in the mean that exploration is measured by."""
DRIFT_WEIGHT: Final = 0.05
"""Weight of the last reward in the relative distance of rewards from what is known: some 20 episodes."""
DRIFT_MAX: Final = 0.25
"""Mean one-sided distance that means a shift. Single rewards vary more: a bin has batches of up to twice the size."""
KNOWN_MIN: Final = 5.0
"""Rewards of a state and action before what is known of it can be wrong."""


class BatchState(NamedTuple):
    """The state ``s = (b, Δ, w)`` of a batch (§4.3.1)."""

    batch: int
    """Requests in the batch."""
    loss: int
    """Levels by which the shared prefix would become shorter."""
    peers: int
    """Other waiting requests that share the prefix left then."""


class Taken(NamedTuple):
    """A decision that was taken in a state."""

    state: BatchState
    action: Action


class StoppingPolicy(Protocol):
    """A rule for when a batch is left as it is. Not thread-safe; the same calls have the same answers."""

    learns: bool
    """True if its answers may change after each round."""

    @property
    def exploring(self) -> float:
        """Share of the last decisions that were made to learn more."""

    @property
    def shifts(self) -> int:
        """Times that what was known stopped being true."""

    def seen(self, state: BatchState) -> tuple[int, ...]:
        """Returns what the rule sees of a state: it treats states that are equal then as one."""

    def adds(self, state: BatchState) -> bool:
        """Returns whether the request enters; otherwise, the batch is left as it is."""

    def learn(self, episode: Sequence[Taken], tokens_s: float) -> None:
        """Learns from decisions whose batches (each ends where none was added) decoded ``tokens_s`` tokens a second."""

    def table(self) -> dict[str, list[float]]:
        """Returns what was learned, for :meth:`restore`."""

    def restore(self, table: Mapping[str, Sequence[float]]) -> None:
        """Restores a table. Raises ``ValueError`` if it is not of this rule."""


class Bins(NamedTuple):
    batch: int
    loss: int
    peers: int


def binned(state: BatchState) -> Bins:
    """Returns exponential bins for the batch and the peers, and coarse thresholds for the loss (§4.3.1)."""
    loss = state.loss
    return Bins(state.batch.bit_length(), loss if loss < 3 else 3 if loss < 5 else 4, state.peers.bit_length())


class Always:
    """A rule that never stops: what is left without learning (§5.4.2). The order is that of the tree."""

    learns = False
    exploring = 0.0
    shifts = 0

    def seen(self, state: BatchState) -> tuple[int, ...]:
        return state

    def adds(self, state: BatchState) -> bool:
        return True

    def learn(self, episode: Sequence[Taken], tokens_s: float) -> None:
        """Ignores the episode: there is nothing to learn."""

    def table(self) -> dict[str, list[float]]:
        return {}

    def restore(self, table: Mapping[str, Sequence[float]]) -> None:
        if table:
            raise ValueError("a policy that does not learn has no table")


class Heuristic(Always):
    """The heuristic of §4.3.2: requests without loss enter, a small batch takes any, others may lose so much."""

    def adds(self, state: BatchState) -> bool:
        if state.loss <= 0 or state.batch < SMALL:
            return True
        return state.loss <= (LOSS_MAX_MANY if state.peers + 1 >= MANY else LOSS_MAX)


class Drift:
    """The distance of rewards from what was known, to one side."""

    __slots__ = ("_share", "shifts")

    def __init__(self) -> None:
        self._share = 0.0
        self.shifts = 0

    def shifted(self, apart: Sequence[float]) -> bool:
        """Returns whether there is a new shift. ``apart``: each decision's reward by the known mean, minus 1."""
        if not apart:
            return False
        self._share += DRIFT_WEIGHT * (sum(apart) / len(apart) - self._share)
        if abs(self._share) <= DRIFT_MAX:
            return False
        self._share = 0.0
        self.shifts += 1
        return True


class _Arm:
    """The rewards of an action in a state."""

    __slots__ = ("count", "total")

    def __init__(self, count: float = 0.0, total: float = 0.0) -> None:
        self.count = count
        self.total = total

    def mean(self) -> float:
        return self.total / self.count

    def fade(self, keep: float) -> None:
        self.count *= keep
        self.total *= keep

    def weigh(self, count: float) -> None:
        """Limits the number of trials to ``count``, with the same mean."""
        if self.count > count:
            self.total *= count / self.count
            self.count = count


class Bandit:
    """A bandit by upper confidence bounds (§4.3.3): the mean reward, and more for what was tried less."""

    def __init__(self) -> None:
        self.learns = True
        self._arms: dict[Bins, tuple[_Arm, _Arm]] = {}
        """Pairs of (stop, add)."""
        self._total = 0.0
        """Decisions that were rewarded."""
        self._scale = 0.0
        self._drift = Drift()
        self.exploring = 0.0

    @property
    def shifts(self) -> int:
        return self._drift.shifts

    def seen(self, state: BatchState) -> tuple[int, ...]:
        return binned(state)

    def adds(self, state: BatchState) -> bool:
        stop, add = self._of(binned(state))
        # Of untried actions, adding comes first: other rules do so.
        if add.count == 0.0 or stop.count == 0.0:
            chosen, best = add.count == 0.0, False
        else:
            chosen = self._bound(add) >= self._bound(stop)
            best = chosen == (add.mean() >= stop.mean())
        self.exploring += SCALE_WEIGHT * ((0.0 if best else 1.0) - self.exploring)
        return chosen

    def _bound(self, arm: _Arm) -> float:
        spread = EXPLORATION * self._scale
        return arm.mean() + spread * math.sqrt(math.log(max(self._total, 1.0)) / arm.count)

    def _of(self, bins: Bins) -> tuple[_Arm, _Arm]:
        arms = self._arms.get(bins)
        if arms is None:
            arms = self._arms[bins] = _Arm(), _Arm()
        return arms

    def learn(self, episode: Sequence[Taken], tokens_s: float) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._scale += (SCALE_WEIGHT if self._scale else 1.0) * (tokens_s - self._scale)
        taken = [self._of(binned(state))[action] for state, action in episode]
        known = [arm.mean() for arm in taken if arm.count >= KNOWN_MIN and arm.total > 0]
        if self._drift.shifted([tokens_s / mean - 1.0 for mean in known]):
            self._forget()
        for state, action in episode:
            arms = self._of(binned(state))
            arm = arms[action]
            for each in arms:
                self._total -= each.count * (1.0 - keep)
                each.fade(keep)
            arm.count += 1.0
            arm.total += tokens_s
            self._total += 1.0

    def _forget(self) -> None:
        """Keeps the means as a first guess, and lets everything be tried anew."""
        for arms in self._arms.values():
            for arm in arms:
                arm.weigh(DOUBT)
        self._total = sum(arm.count for arms in self._arms.values() for arm in arms)

    def table(self) -> dict[str, list[float]]:
        return {
            bins_text(bins): [stop.count, stop.total, add.count, add.total] for bins, (stop, add) in self._arms.items()
        }

    def restore(self, table: Mapping[str, Sequence[float]]) -> None:
        arms: dict[Bins, tuple[_Arm, _Arm]] = {}
        for text, numbers in table.items():
            stop_count, stop_total, add_count, add_total = table_numbers(numbers, 4)
            if min(stop_count, stop_total, add_count, add_total) < 0:
                raise ValueError(f"a state was never tried less often than never, or for less than nothing: {text}")
            arms[bins_of(text)] = _Arm(stop_count, stop_total), _Arm(add_count, add_total)
        self._arms = arms
        every = [arm for pair in arms.values() for arm in pair]
        self._total = sum(arm.count for arm in every)
        self._scale = sum(arm.total for arm in every) / self._total if self._total else 0.0


def bins_text(bins: Bins) -> str:
    """Returns the text that stands for bins in a table."""
    return f"{bins.batch}/{bins.loss}/{bins.peers}"


def bins_of(text: str) -> Bins:
    """Returns the bins of a :func:`bins_text`. Raises ``ValueError``."""
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdigit() and len(part) <= 2 for part in parts):
        raise ValueError(f"no state of a batch: {text[:40]!r}")
    return Bins(int(parts[0]), int(parts[1]), int(parts[2]))


def table_numbers(numbers: Sequence[float], count: int) -> list[float]:
    """Returns the numbers of one state in a table. Raises ``ValueError``."""
    if len(numbers) != count or not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
        raise ValueError(f"a state has {count} numbers in the table")
    return [float(each) for each in numbers]
