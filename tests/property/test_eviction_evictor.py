"""The counts and protections of an evictor, against sets and lists that keep everything."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS
from pinyon.eviction.evictor import Evictor
from pinyon.eviction.interface import Known
from tests.long import usually

KEYS = range(12)
SPARED_MAX = 5
some = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)


class EvictorMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.evictor: Evictor[int] = Evictor(EVICTION_POLICIES.make(self.policy), spared_max=SPARED_MAX)
        self.now_s = 0.0
        self.held: set[int] = set()
        self.pinned_keys: set[int] = set()
        self.wants: list[list[int]] = []
        self.places: dict[int, int] = {}
        """The place of each wanted key, from the first request that wanted it."""
        self.history: list[tuple[int, float]] = []
        """The last evicted keys that have not come back, as many as were held at the last eviction."""
        self.gaps: list[float] = []
        self.went = 0

    def chosen(self, keys: list[int], of: set[int]) -> list[int]:
        return [key for key in keys if key in of]

    @rule(keys=some, seconds=st.integers(0, 5), pinned=st.booleans())
    def stored(self, keys: list[int], seconds: int, pinned: bool) -> None:
        self.now_s += seconds
        new = [key for key in keys if key not in self.held]
        for key in new:
            self.gaps += [self.now_s - went_s for ghost, went_s in self.history if ghost == key]
        self.history = [each for each in self.history if each[0] not in new]
        tell = self.evictor.stored_pinned if pinned else self.evictor.stored
        tell(new, self.now_s, NO_TRAITS, range(len(new)))
        self.held |= set(new)
        self.pinned_keys |= set(new if pinned else ())

    @rule(keys=some)
    def used(self, keys: list[int]) -> None:
        keys = self.chosen(keys, self.held)
        self.evictor.used(keys, self.now_s, None, range(len(keys)))

    @rule(keys=some)
    def pinned(self, keys: list[int]) -> None:
        keys = self.chosen(keys, self.held - self.pinned_keys)
        self.evictor.pinned(keys, self.now_s)
        self.pinned_keys |= set(keys)

    @rule(keys=some)
    def unpinned(self, keys: list[int]) -> None:
        keys = self.chosen(keys, self.pinned_keys)
        self.evictor.unpinned(keys, self.now_s)
        self.pinned_keys -= set(keys)

    @rule(keys=some)
    def dropped(self, keys: list[int]) -> None:
        """Drops keys without eviction, which must not count as a regretted eviction."""
        gone = self.chosen(keys, self.held)
        self.evictor.dropped(gone, self.now_s)
        self.held -= set(gone)
        self.pinned_keys -= set(gone)

    @rule(keys=some)
    def want(self, keys: list[int]) -> None:
        count = self.evictor.want(keys)
        for place, key in enumerate(keys[:count]):
            self.places.setdefault(key, place)
        self.wants.append(keys[:count])
        assert len(self.places) <= SPARED_MAX
        if count < len(keys):
            assert keys[count] not in self.places
            assert len(self.places) == SPARED_MAX

    @rule(data=st.data())
    def unwant(self, data: st.DataObject) -> None:
        if self.wants:
            self.evictor.unwant(self.wants.pop(data.draw(st.integers(0, len(self.wants) - 1))))
            wanted = {key for keys in self.wants for key in keys}
            self.places = {key: place for key, place in self.places.items() if key in wanted}

    @rule(count=st.integers(0, 8))
    def victims(self, count: int) -> None:
        may_go = self.held - self.pinned_keys
        spared = may_go & self.places.keys()
        gone = self.evictor.victims(count, self.now_s)
        assert len(set(gone)) == len(gone) == min(count, len(may_go))
        assert set(gone) <= may_go
        taken = set(gone) & spared
        assert len(taken) == max(0, len(gone) - len(may_go - spared)), "what is wanted goes last"
        left = [self.places[key] for key in spared - taken]
        assert not taken or min(self.places[key] for key in taken) >= max(left, default=0), "the deepest first"
        self.gone(gone)

    @rule(keys=some)
    def evict(self, keys: list[int]) -> None:
        gone = self.chosen(keys, self.held - self.pinned_keys)
        self.evictor.evict(gone, self.now_s)
        self.gone(gone)

    def gone(self, keys: list[int]) -> None:
        self.history += [(key, self.now_s) for key in keys]
        self.history = self.history[max(0, len(self.history) - len(self.held)) :]
        self.held -= set(keys)
        self.went += len(keys)

    @rule(policy=st.sampled_from(EVICTION_POLICIES.names))
    def switch(self, policy: str) -> None:
        pinned = sorted(self.pinned_keys)
        self.evictor.switch(EVICTION_POLICIES.make(policy), pinned, lambda key: Known(NO_TRAITS, key, None), self.now_s)

    @invariant()
    def it_counts(self) -> None:
        evictor, may_go = self.evictor, self.held - self.pinned_keys
        assert evictor.evicted == self.went
        assert evictor.regrets == (len(self.gaps), sum(self.gaps))
        assert len(evictor) == len(may_go)
        assert all((key in evictor) == (key in may_go) for key in KEYS)
        assert evictor.wanted == len(self.places)

    def teardown(self) -> None:
        while self.wants:
            self.evictor.unwant(self.wants.pop())
        assert self.evictor.wanted == 0
        may_go = self.held - self.pinned_keys
        assert set(self.evictor.victims(len(KEYS), self.now_s)) == may_go


for name in EVICTION_POLICIES.names:
    case = type(f"EvictorMachine_{name}", (EvictorMachine,), {"policy": name}).TestCase
    case.settings = settings(max_examples=usually(20, long=60), stateful_step_count=40)
    globals()[f"TestEvictor_{name}"] = case
del case  # otherwise it is collected as well
