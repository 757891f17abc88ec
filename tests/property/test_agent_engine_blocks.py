"""The agent's tables against a model of the engine whose events they follow, with losses, restarts and rubbish."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinyon.core.block_keys import salt_of
from services.agent.cache_events import read_events
from services.agent.engine_blocks import COUNTED, EngineBlocks
from tests.long import usually
from tests.unit.agent.engine_model import BLOCK_TOKENS, START, EngineModel, Prompt

A, B = tuple(range(1, 22)), (*range(1, 9), *range(50, 62))
PROMPTS = [
    *(Prompt(A), Prompt(B), Prompt(A, salt="mine"), Prompt(A, salt=salt_of("anna", "", b"secret"))),
    *(
        Prompt(A, lora="sql"),
        Prompt(B, salt="mine", lora="sql"),
        Prompt(A, lora="mine"),
        Prompt(B, image_at=2),
        Prompt(A, image_at=0),
    ),
    *(Prompt(B, salt="mine", image_at=0), Prompt((70_000,) * 20)),
]
BUFFER = 4


def run(steps: Any) -> None:
    for _ in steps:
        pass


class FollowMachine(RuleBasedStateMachine):
    """An engine that publishes batches, some of which are lost, and tables that follow them."""

    @initialize(maps=st.booleans(), raw=st.booleans(), replays=st.booleans())
    def begin(self, maps: bool, raw: bool, replays: bool) -> None:
        self.engine, self.replays = EngineModel(maps, raw), replays
        self.counts = dict.fromkeys(COUNTED, 0)
        self.held = EngineBlocks(START, BLOCK_TOKENS, 1000, self.counts, {"sql": "", "mine": ""})
        self.reported: set[bytes] = set()
        self.whole = True
        """True while the tables know all batches of this life."""
        self.newest = True
        """True if the last batch was not lost."""
        self.published: list[Any] = []
        self.arrived = 0

    def publish(self, events: list[Any], lost: bool) -> None:
        number = len(self.published)
        self.published.append([1.5, events, 0])
        self.newest = not lost
        if lost:
            return
        first = self.held.missing(number)
        missed = number - (first if first is not None else number)
        if first is not None and self.replays:
            oldest = max(0, number + 1 - BUFFER)
            for each in range(max(first, oldest), number + 1):
                run(self.held.take(each, self.published[each]))
            missed = max(0, oldest - first)
        run(self.held.take(number, self.published[number]))
        self.whole = self.whole and not missed

    @rule(prompt=st.sampled_from(PROMPTS), first=st.integers(0, 5), lost=st.booleans())
    def store(self, prompt: Prompt, first: int, lost: bool) -> None:
        self.publish(self.engine.store(prompt, first), lost)

    @rule(prompts=st.lists(st.sampled_from(PROMPTS), max_size=4), evicted=st.lists(st.integers(0, 50), max_size=8))
    def step(self, prompts: list[Prompt], evicted: list[int]) -> None:
        events = [event for prompt in prompts for event in self.engine.store(prompt, 1)]
        self.publish(events + [event for at in evicted for event in self.engine.evict(at)], False)

    @rule(at=st.integers(0, 50), lost=st.booleans())
    def evict(self, at: int, lost: bool) -> None:
        self.publish(self.engine.evict(at), lost)

    @rule(lost=st.booleans())
    def clear(self, lost: bool) -> None:
        self.publish(self.engine.clear(), lost)
        self.whole = self.whole or not lost

    @rule()
    def elsewhere(self) -> None:
        self.publish(self.engine.elsewhere(), False)

    @rule(rubbish=st.sampled_from([None, 7, [1.5], [1.5, [["BlockRemoved", ["a"]]]], [1.5, [{}]], [1.5, [[[]]]]]))
    def rubbish(self, rubbish: Any) -> None:
        number = len(self.published)
        self.published.append(rubbish)
        if self.held.missing(number) is not None:
            self.whole = False
        run(self.held.take(number, rubbish))
        self.whole, self.newest = False, True
        assert not len(self.held)

    @rule()
    def restart(self) -> None:
        """Begins another life, of which the first batch comes."""
        if not any(True for _ in self.published):
            return
        self.engine.copies.clear()
        known = self.held._last
        self.published = []
        if known >= 0:
            self.whole = True
            self.publish([], False)

    @rule(known=st.integers(0, 10))
    def replay_of_what_is_known(self, known: int) -> None:
        for number, batch in enumerate(self.published[: min(known, self.held.next)]):
            run(self.held.take(number, batch))

    @invariant()
    def what_is_held_is_known(self) -> None:
        if not hasattr(self, "held"):
            return
        keys = set(self.held.keys())
        if self.newest:
            assert keys <= self.engine.held()
            if self.whole:
                assert keys == self.engine.held()
        stored, removed = self.held.changes.drain()
        assert self.reported.isdisjoint(stored)
        assert self.reported.issuperset(removed)
        self.reported = self.reported.union(stored).difference(removed)
        assert self.reported == keys


TestFollow = FollowMachine.TestCase
TestFollow.settings = settings(max_examples=usually(150, long=3000), stateful_step_count=40)

plain = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4)
json = st.recursive(
    plain | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
KINDS = ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
MEMBERS = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name", "extra_keys", "medium"]
maps = st.builds(
    lambda kind, members: {**members, "type": kind},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(MEMBERS), json, max_size=7),
)
lists = st.builds(lambda kind, members: [kind, *members], st.sampled_from(KINDS), st.lists(json, max_size=8))
batches = st.builds(lambda events: [0.5, events, 0], st.lists(maps | lists | json, max_size=3))


@given(batch=json | batches)
def test_any_batch_is_read_or_refused(batch: Any) -> None:
    counts = dict.fromkeys(COUNTED, 0)
    try:
        read_events(batch)
    except ValueError:
        refused = True
    else:
        refused = False
    run(EngineBlocks(START, BLOCK_TOKENS, 1000, counts).take(0, batch))
    assert counts["malformed_batches"] == refused
