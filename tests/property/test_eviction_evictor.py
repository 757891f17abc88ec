"""What an evictor counts, against lists that keep everything."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS
from pinyon.eviction.evictor import Evictor

KEYS = range(12)
some = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)


class EvictorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.evictor: Evictor[int] = Evictor(EVICTION_POLICIES.make("lru"))
        self.now_s = 0.0
        self.held: set[int] = set()
        self.history: list[tuple[int, float]] = []
        """Of what went and has not come back, the last ones: as many as were held at the last eviction."""
        self.gaps: list[float] = []
        self.went = 0

    @rule(keys=some, seconds=st.integers(0, 5))
    def stored(self, keys: list[int], seconds: int) -> None:
        self.now_s += seconds
        new = [key for key in keys if key not in self.held]
        for key in new:
            self.gaps += [self.now_s - went_s for ghost, went_s in self.history if ghost == key]
        self.history = [each for each in self.history if each[0] not in new]
        self.evictor.stored(new, self.now_s, NO_TRAITS, range(len(new)))
        self.held |= set(new)

    @rule(keys=some)
    def dropped(self, keys: list[int]) -> None:
        """Not evicted: nobody regrets it."""
        gone = [key for key in keys if key in self.held]
        self.evictor.dropped(gone, self.now_s)
        self.held -= set(gone)

    @rule(count=st.integers(0, 6))
    def victims(self, count: int) -> None:
        gone = self.evictor.victims(count, self.now_s)
        assert len(gone) == min(count, len(self.held))
        self.gone(gone)

    @rule(keys=some)
    def evict(self, keys: list[int]) -> None:
        gone = [key for key in keys if key in self.held]
        self.evictor.evict(gone, self.now_s)
        self.gone(gone)

    def gone(self, keys: list[int]) -> None:
        assert self.held >= set(keys)
        self.history += [(key, self.now_s) for key in keys]
        self.history = self.history[max(0, len(self.history) - len(self.held)) :]
        self.held -= set(keys)
        self.went += len(keys)

    @rule(policy=st.sampled_from(EVICTION_POLICIES.names))
    def switch(self, policy: str) -> None:
        self.evictor.switch(EVICTION_POLICIES.make(policy), (), lambda _: (NO_TRAITS, 0), self.now_s)

    @invariant()
    def it_counts(self) -> None:
        assert self.evictor.evicted == self.went
        assert self.evictor.regrets == (len(self.gaps), sum(self.gaps))
        assert len(self.evictor) == len(self.held)
        assert all((key in self.evictor) == (key in self.held) for key in KEYS)


TestEvictor = EvictorMachine.TestCase
TestEvictor.settings = settings(max_examples=100, stateful_step_count=40)
