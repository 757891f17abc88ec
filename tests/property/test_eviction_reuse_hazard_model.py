"""Evictions by ``reuse_hazard`` against a model that looks at every run that is held.

The model takes some facts from the policy. These are the class of a request's run (with its turn, and how often
requests branched at its end), when that begins and ends a sample, and the table's constants.

The model computes by itself which keys extend which (a key is its prompt up to there), which are pinned, and where runs
begin. It knows when and by whom a run was used last, how many keys each tenant has, and which tenants are above their
share. It computes ages, bins and values (trying every time to hold until), and life tables (counted anew at each fit,
from all samples that ever began). From these it derives which keys may go, and their worth.

The policy is held to these definitions:

- A run counts as used when it was begun or a request used all of it. A head that a request cuts off counts as used
  then; the rest keeps its time.
- When all extensions of a run are gone and belonged to its conversation alone, the run counts as used when they were.
- A share does not protect faded keys. Tenants above their share are determined at each call, so in calls for several
  keys only the first choice is certain. Of the others it is checked that they could go.
- Pinned keys hold all before them; keys behind them in their run may go.
- A fit forgets a class without parts and running samples whose observations have faded; its parent keeps them.

The guard is off. A key is pinned with all before it, and dropped with all that extends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import pytest

from pinyon.eviction import NO_TRAITS, Traits
from pinyon.eviction.fair_queues import FADED
from pinyon.eviction.hazard_table import EDGES_S, FALL, FIRST_RATE, FORGOTTEN, LEVEL_PRIOR, PRIOR, HazardClass, Sample
from pinyon.eviction.reuse_hazard import ReuseHazard, ReuseHazardSettings
from pinyon.eviction.tenant_shares import KNOWN, LATER, LONGEST_S, RARE, ROUND

Path = tuple[int, ...]
"""A key: the blocks of its prompt up to there."""
WINDOW_S = 500.0
REFIT_S = 8.0
BINS = len(EDGES_S)
WIDTHS_S = [*(end - start for start, end in pairwise(EDGES_S)), EDGES_S[-1]]
STEPS_S = [0.0, 0.0, 0.125, 0.5, 3.0, 11.0, 70.0, 900.0]
"""Time steps that add up without rounding."""
TRAITS = [NO_TRAITS, *(Traits(f"{kind}/{turn}", tenant) for kind in "ab" for turn in (1, 3) for tenant in "xyz")]
EPSILON = 1e-9


class Life:
    """The life of one sample."""

    def __init__(self, of: Hashable, last_s: float, fits: int) -> None:
        self.of, self.last_s, self.begun = of, last_s, fits
        self.again: tuple[float, int] | None = None
        """The time of its next use, and the number of fits before it."""
        self.until_s = math.inf
        """The end of its observation; later survival does not count."""
        self.looked_s = -math.inf
        """The time when the table looked at it last."""


class NaiveTable:
    """A table of classes by their names."""

    def __init__(self) -> None:
        self.lives: dict[Sample, Life] = {}
        self.fits: list[float] = []
        self.parents: dict[Hashable, Hashable | None] = {}
        self.kept: set[Hashable] = set()
        self.values: dict[Hashable, list[float]] = {"": [FIRST_RATE * FALL**bin for bin in range(BINS)]}
        self.forgotten = 0

    def watch(self, table: Any) -> None:
        """Records what the classification tells the table."""
        begin, again, give_up, of, advance = table.begin, table.again, table.give_up, table.of, table.advance

        def began(of_: HazardClass, now_s: float) -> Sample:
            sample: Sample = begin(of_, now_s)
            self.lives[sample] = Life(of_.name, now_s, len(self.fits))
            return sample

        def used(sample: Sample, now_s: float) -> None:
            if not sample.over:
                self.lives[sample].again = now_s, len(self.fits)
                self.lives[sample].until_s = now_s
            again(sample, now_s)

        def given_up(sample: Sample) -> None:
            if not sample.over and self.lives[sample].again is None:
                self.lives[sample].until_s = self.lives[sample].looked_s
            give_up(sample)

        def named(name: Hashable, parent: HazardClass) -> HazardClass:
            found: HazardClass = of(name, parent)
            assert found.name == name
            self.parents[name] = parent.name
            return found

        def looked(now_s: float) -> None:
            for life in self.lives.values():
                life.looked_s = now_s
            advance(now_s)

        for each in table._classes.values():
            self.parents[each.name] = None if each.parent is None else each.parent.name
        self.kept = set(self.parents)
        table.begin, table.again, table.give_up, table.of, table.advance = began, used, given_up, named, looked

    def value(self, name: Hashable, bin: int) -> float:
        """Returns a class's value. A class newer than the last fit has its parent's, a forgotten one the root's."""
        while name not in self.values:
            name = self.parents.get(name, "")
        return self.values[name][bin]

    def fit(self, now_s: float) -> None:
        self.fits.append(now_s)
        for name in sorted(self.parents, key=lambda name: -len(self._wholes(name))):
            self._forget(name)
        again = {name: [0.0] * BINS for name in self.parents}
        seen = {name: [0.0] * BINS for name in self.parents}
        for life in self.lives.values():
            for of in self._wholes(life.of):
                self._count(life, again[of], seen[of])
        hazards: dict[Hashable, list[float]] = {}
        for name in sorted(self.parents, key=lambda name: len(self._wholes(name))):
            hazards[name] = self._hazards(self.parents[name], hazards, again[name], seen[name])
        self.values = {name: [best_of(each, bin) for bin in range(BINS)] for name, each in hazards.items()}

    def _forget(self, name: Hashable) -> None:
        """Forgets a class of which nothing is known any more."""
        lives = [life for life in self.lives.values() if life.of == name]
        seen = [0.0] * BINS
        goes_on = [self._count(life, [0.0] * BINS, seen) for life in lives]
        if any(goes_on) or sum(seen) >= FORGOTTEN or name in self.kept or name in self.parents.values():
            return
        whole = self.parents.pop(name)
        for life in lives:
            life.of = whole
        self.forgotten += 1

    def _wholes(self, name: Hashable | None) -> list[Hashable]:
        """Returns the class and all classes that it is a part of."""
        return [] if name is None else [name, *self._wholes(self.parents[name])]

    def _weight(self, fit: int) -> float:
        """Returns the weight of an observation first counted at that fit. The first fit fades nothing."""
        return math.exp((self.fits[max(fit, 1) - 1] - self.fits[-1]) / WINDOW_S)

    def _count(self, life: Life, again: list[float], seen: list[float]) -> bool:
        """Counts a life in the bins; returns whether it continues."""
        now_s = self.fits[-1]
        for bin in range(BINS):
            end_s = life.last_s + (2 * EDGES_S[-1] if bin == BINS - 1 else EDGES_S[bin + 1])
            if end_s <= min(now_s, life.until_s):  # survived the bin
                counted = next(fit for fit, at_s in enumerate(self.fits) if at_s >= end_s)
                seen[bin] += self._weight(max(life.begun, counted))
                continue
            if life.again is not None:
                used_s, fit = life.again
                assert life.last_s + EDGES_S[bin] <= used_s
                again[bin] += self._weight(fit)
                seen[bin] += self._weight(fit)
            elif life.until_s == math.inf:
                seen[bin] += 0.5
                return True
            return False
        return False

    @staticmethod
    def _hazards(
        parent: Hashable | None, hazards: dict[Hashable, list[float]], again: list[float], seen: list[float]
    ) -> list[float]:
        if parent is None:
            found: list[float] = []
            rate = FIRST_RATE
            for bin, width_s in enumerate(WIDTHS_S):
                found.append((again[bin] + 1.0 - math.exp(-rate * width_s)) / (seen[bin] + 1.0))
                rate = -math.log(1.0 - min(0.999, found[-1])) / width_s * FALL
            return found
        usual = hazards[parent]
        expected = sum(count * hazard for count, hazard in zip(seen, usual, strict=True))
        level = (sum(again) + LEVEL_PRIOR) / (expected + LEVEL_PRIOR)
        return [(again[bin] + PRIOR * min(0.999, usual[bin] * level)) / (seen[bin] + PRIOR) for bin in range(BINS)]


def best_of(hazards: list[float], start: int) -> float:
    """Returns Gittins' index, uses (in mid-bin) over seconds held, by trying each time to hold until."""

    def ratio(until: int) -> float:
        uses = held_s = 0.0
        for bin in range(start, until):
            alive = math.prod(1.0 - hazard for hazard in hazards[start:bin])
            uses += alive * hazards[bin]
            held_s += alive * WIDTHS_S[bin] * (hazards[bin] / 2 + (1.0 - hazards[bin]))
        return uses / held_s

    return max(ratio(until) for until in range(start + 1, BINS + 1))


class Said(NamedTuple):
    """The classification of a run."""

    of: Hashable
    turn: int
    branches: int


class NaiveRuns:
    """The runs that are held; a run is named by its first key."""

    def __init__(self, fair: bool) -> None:
        self.fair = fair
        self.table = NaiveTable()
        self.held: set[Path] = set()
        self.pins: set[Path] = set()
        self.last_s: dict[Path, float] = {}
        self.tenants: dict[Path, str] = {}
        self.gaps_s: dict[str, list[float]] = {}
        """The times between uses of what each tenant used again."""
        self.growing: set[Path] = set()
        self.said: dict[Path, Said] = {}

    def children(self, key: Path) -> list[Path]:
        return [each for each in self.held if each[:-1] == key and len(each) == len(key) + 1]

    def first(self, key: Path) -> Path:
        while key not in self.last_s:
            key = key[:-1]
        return key

    def keys(self, first: Path) -> list[Path]:
        return sorted((key for key in self.held if self.first(key) == first), key=len)

    def _cut(self, key: Path, now_s: float) -> None:
        """Ends a run after this key."""
        for rest in self.children(key):
            if rest not in self.last_s:
                head = self.first(key)
                self.growing.discard(head)
                self.last_s[rest], self.last_s[head] = self.last_s[head], now_s
                self.tenants[rest] = self.tenants[head]

    def stored(self, keys: list[Path], now_s: float, tenant: str) -> None:
        before = keys[0][:-1]
        if before:
            self._cut(before, now_s)
            run = self.first(before)
            if run in self.growing and not self.children(before) and self.pins.issuperset(self.keys(run)):
                self.held.update(keys)
                return
        self.held.update(keys)
        self.last_s[keys[0]], self.tenants[keys[0]] = now_s, tenant
        self.growing.add(keys[0])

    def used(self, keys: list[Path], now_s: float, tenant: str | None) -> None:
        for first in {self.first(key) for key in keys}:
            if tenant in (None, self.tenants[first]):
                self.gaps_s.setdefault(self.tenants[first], []).append(now_s - self.last_s[first])
        self._cut(keys[-1], now_s)
        for first in {self.first(key) for key in keys}:
            self.last_s[first] = now_s
            self.growing.discard(first)
            if tenant is not None:
                self.tenants[first] = tenant

    def gone(self, key: Path) -> None:
        self.held.remove(key)
        self.pins.discard(key)
        if key not in self.last_s:
            return
        last_s, said, _ = self.last_s.pop(key), self.said.pop(key), self.tenants.pop(key)
        self.growing.discard(key)
        before = self.first(key[:-1]) if key[:-1] else None
        if before and said.turn and not self.children(key[:-1]) and not self.said[before].branches:
            self.last_s[before] = last_s
            self.said[before] = Said(said.of, said.turn, 0)

    # -- what may be evicted

    def above(self, tenant: str) -> int:
        """Returns how many keys the tenant has above its share."""
        counts = [self.tenants[self.first(key)] for key in self.held]
        if not self.fair or len(set(counts)) == 1:
            return len(counts)
        return max(0, counts.count(tenant) - len(counts) // len(set(counts)))

    def ends(self) -> list[Path]:
        """Returns the last keys of runs that may go."""
        lasts = [self.keys(first)[-1] for first in self.last_s]
        return [key for key in lasts if key not in self.pins and not self.children(key)]

    def choice(self, now_s: float) -> tuple[list[Path], list[Path]]:
        """Returns the keys that may go, and those that are compared: keys that faded since the last fit need not be."""
        ends = self.ends()
        above = [key for key in ends if self.above(self.tenants[self.first(key)])]
        faded = [key for key in ends if self.fair and key not in above and self.faded(key, now_s)]
        return above + faded or ends, above if above or faded else ends

    def faded(self, key: Path, now_s: float) -> bool:
        """Returns whether a key is old and almost worthless, so that no share protects it."""
        old = now_s - self.last_s[self.first(key)] >= self.protects_s(self.tenants[self.first(key)])
        return old and FADED * self.worth(key, now_s) <= self.table.value(self.said[self.first(key)].of, 0)

    def protects_s(self, tenant: str) -> float:
        known = {}
        for each, gaps_s in self.gaps_s.items():
            if seen := gaps_s[: len(gaps_s) // ROUND * ROUND]:
                powers = (2.0**power for power in range(20))
                known[each] = LATER * next(at for at in powers if sum(gap > at for gap in seen) <= RARE * len(seen))
        usual = sorted(known.values())[len(known) * 3 // 4] if len(known) >= KNOWN else LONGEST_S
        return min(LONGEST_S, known.get(tenant, usual))

    def worth(self, key: Path, now_s: float) -> float:
        age_s = now_s - self.last_s[self.first(key)]
        bin = max(bin for bin in range(BINS) if EDGES_S[bin] <= age_s)
        return self.table.value(self.said[self.first(key)].of, bin)


class Machine:
    """The policy and its model, which get the same random calls."""

    def __init__(self, seed: int, fair: bool) -> None:
        self.random = Random(seed)
        self.policy: ReuseHazard[Path] = ReuseHazard(ReuseHazardSettings(WINDOW_S, REFIT_S, fair, guard=False))
        self.model = NaiveRuns(fair)
        self.model.table.watch(self.policy._table)
        self.now_s = 0.0
        self.refit_at_s = -math.inf
        self.asked: list[Path] = [()]
        self.reading: list[Path] = []
        """Prompts whose keys are pinned as far as they are held."""
        self.choices = 0
        """The number of victims that were a choice."""

    def request(self) -> None:
        """Makes a request, which may stay pinned, stored in one or two chunks; or its end is told first."""
        random = self.random
        known = random.choice(self.asked[-12:])
        prompt = known[: random.choice([len(known), len(known), random.randint(0, len(known))])]
        prompt = (*prompt, *(random.randrange(3) for _ in range(random.randint(not prompt, 4))))[:12]
        self.asked.append(prompt)
        traits = random.choice(TRAITS)
        keys = [prompt[: end + 1] for end in range(len(prompt))]
        held = [key for key in keys if key in self.model.held]
        new = keys[len(held) :]
        order: list[Callable[[], None]] = [lambda: self.use(held, random.choice([traits, traits, traits, None]))]
        reads = random.random() < 0.4
        if reads:
            self.pin(held)
            self.reading.append(prompt)
        at = random.randint(0, len(new)) if reads else 0
        order.append(lambda: self.store(new[:at], traits, reads))
        order.append(lambda: self.store(new[at:], traits, reads))
        for tell in order if reads or random.random() < 0.5 else reversed(order):
            tell()

    def use(self, keys: list[Path], traits: Traits | None) -> None:
        if keys:
            self.policy.used(keys, self.now_s, traits, range(len(keys)))
            self.model.used(keys, self.now_s, None if traits is None else traits.tenant)

    def store(self, keys: list[Path], traits: Traits, reads: bool) -> None:
        if keys:
            before = keys[0][:-1] or None
            self.policy.stored(keys, self.now_s, traits, range(len(keys[0]) - 1, len(keys[-1])), before)
            self.model.stored(keys, self.now_s, traits.tenant)
            if reads:
                self.pin(keys)

    def pin(self, keys: list[Path]) -> None:
        fresh = [key for key in keys if key not in self.model.pins]
        self.policy.pinned(fresh, self.now_s)
        self.model.pins.update(fresh)

    def want(self) -> None:
        """Lets a request wait whose prompt begins like another one."""
        prompt = self.random.choice(self.asked[-12:])
        prompt = prompt[: self.random.randint(0, len(prompt))]
        self.pin([key for end in range(len(prompt)) if (key := prompt[: end + 1]) in self.model.held])
        self.reading.append(prompt)

    def read(self) -> None:
        if self.reading:
            self.reading.pop(self.random.randrange(len(self.reading)))
            freed = [key for key in self.model.pins if not any(each[: len(key)] == key for each in self.reading)]
            self.policy.unpinned(sorted(freed), self.now_s)
            self.model.pins.difference_update(freed)

    def drop(self) -> None:
        if self.model.held:
            top = self.random.choice(sorted(self.model.held))
            gone = sorted((key for key in self.model.held if key[: len(top)] == top), key=lambda key: (-len(key), key))
            self.policy.dropped(gone, self.now_s)
            for key in gone:
                self.model.gone(key)

    def evict(self) -> None:
        model, now_s = self.model, self.now_s
        peeked = self.policy.peek(now_s) if self.random.random() < 0.3 else None
        if peeked is not None and peeked[1] in model.ends():
            assert peeked[0] == pytest.approx(model.worth(peeked[1], now_s), rel=EPSILON, abs=0.0)
        count = self.random.choice([1, 1, 1, 1, 3, 8])
        gone = self.policy.victims(count, now_s)
        for number, key in enumerate(gone):
            ends = model.ends()
            assert key in ends, f"{key} is not the last of a run that may go"
            if not number:
                may, choice = model.choice(now_s)
                # No tenant is above its share: all queued keys may go, some of which have faded.
                may = may if choice else ends
                assert key in may, f"{key} is of {model.tenants[model.first(key)]!r}, which has not its share"
                worths = [model.worth(each, now_s) for each in choice]
                assert model.worth(key, now_s) <= min(worths, default=math.inf) * (1 + EPSILON), (key, choice, worths)
                assert peeked is None or peeked[1] == key
                self.choices += len(set(worths)) > 1
            model.gone(key)
        assert len(gone) == count or model.held == model.pins

    def learn(self) -> None:
        work = self.policy.refit(self.now_s)
        assert (work is None) == (self.now_s < self.refit_at_s)
        if work is not None:
            self.refit_at_s = self.now_s + REFIT_S
            self.policy.adopt(work())
            self.model.table.fit(self.now_s)
            assert set(self.policy._table._classes) == set(self.model.table.parents)

    def check(self) -> None:
        model, tree = self.model, self.policy._tree
        runs = {run.keys[0]: run for run in tree.runs()}
        assert {first: run.keys for first, run in runs.items()} == {first: model.keys(first) for first in model.last_s}
        for first, run in runs.items():
            assert run.last_s == model.last_s[first]
            model.said[first] = Said(run.of.name if run.of.number else "", run.turn, run.branches)
        assert len(self.policy) == len(model.held - model.pins)

    def run(self, steps: int) -> None:
        rules = [self.request, self.want, self.read, self.drop, self.evict, self.learn]
        for rule in self.random.choices(rules, [10, 2, 5, 0.5, 5, 4], k=steps):
            self.now_s += self.random.choice(STEPS_S) if self.random.random() < 0.97 else 90_000.0
            rule()
            self.check()


@pytest.mark.parametrize("fair", [False, True])
def test_whom_it_evicts(fair: bool) -> None:
    machines = {seed: Machine(seed, fair) for seed in range(5)}
    for seed, machine in machines.items():
        try:
            machine.run(70)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert sum(machine.choices for machine in machines.values()) > 20, "there was nothing to choose"
    assert sum(machine.model.table.forgotten for machine in machines.values()) > 5
