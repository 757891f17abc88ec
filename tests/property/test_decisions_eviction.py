"""A journal is decided again the same, whenever a learning thread ends and whichever policy takes over meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import BatchRequest
from pinyon.core.journal import Codec, Journal
from pinyon.core.request import RequestClass
from pinyon.decisions import JOURNAL_TYPES, InstanceConfig, InstanceDecisions, journal_header, replay_journal
from pinyon.eviction import EVICTION_POLICIES, Traits, fit
from pinyon.eviction.evictor import Evictor
from pinyon.eviction.interface import LearningEviction
from pinyon.paging.second_tier import NO_SLOT
from tests.long import usually
from tests.worker_integrity import check_pool

POOL = 6
LEARNS = "workload_aware:refit_s=1,window_s=60,life_s=4"
CHOICES = (LEARNS, "lru", "workload_aware:refit_s=0.5", "reuse_hazard:refit_s=1")

requests = st.tuples(st.just("request"), st.integers(0, 3), st.integers(1, 4), st.sampled_from(["chat", "file"]))
events = st.lists(
    st.one_of(
        *(requests, requests, requests),
        st.tuples(st.just("done"), st.integers(0, 3)),
        st.tuples(st.just("switch"), st.sampled_from(CHOICES)),
    ),
    max_size=120,
)


@pytest.fixture(scope="module", autouse=True)
def _few_samples_are_enough() -> Iterator[None]:
    with patch.object(fit, "SAMPLES_MIN", 2):
        yield


class Instance:
    """An instance with requests of four documents in turn; ``done`` ends the thread's work."""

    def __init__(self, dram_blocks: int = 0) -> None:
        self.lines: list[str] = []
        self.now_s = 0.0
        self.working: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        config = InstanceConfig(POOL, 16, 4, 64, 32, 2, 8, eviction=LEARNS, refits_apart=True, dram_blocks=dram_blocks)
        journal = Journal(
            lambda line: self.lines.append(f"{line}\n"),
            lambda: self.now_s,
            Codec(JOURNAL_TYPES),
            journal_header(config),
        )
        self.decisions = InstanceDecisions(config, journal, lambda work, adopt: self.working.append((work, adopt)))
        self.number = 0

    def request(self, document: int, blocks: int, kind: str) -> None:
        self.now_s += 0.75
        self.number += 1
        keys = tuple(bytes([document, at]) * 8 for at in range(blocks))
        traits = Traits.of(RequestClass(kind, tenant="t"))
        decisions = self.decisions
        decisions.admission.enqueue(
            BatchRequest(self.number, 16 * blocks + 1, blocks + 1, keys, blocks, decodes=False, traits=traits)
        )
        (grant,) = decisions.admission.admit(self.now_s)
        table, held = grant.reservation.table, grant.reservation.held
        after = keys[held - 1] if held else None
        decisions.reservations.publish(table[held:blocks], keys[held:], self.now_s, traits, held, after)
        decisions.admission.end(self.number)
        decisions.reservations.release(table, self.now_s)
        decisions.reservations.swapped(sum(swap.out != NO_SLOT for swap in decisions.reservations.take_swaps()))

    def done(self, at: int) -> None:
        if self.working:
            work, adopt = self.working.pop(at % len(self.working))
            adopt(work())

    def switch(self, choice: str) -> None:
        self.decisions.eviction.switch(choice, self.now_s)


@settings(max_examples=usually(25, long=150))
@given(events, st.sampled_from([0, 3]))
def test_a_journal_of_what_was_learned_apart(told: list[tuple[Any, ...]], dram_blocks: int) -> None:
    instance = Instance(dram_blocks)
    for name, *arguments in told:
        getattr(instance, name)(*arguments)
        check_pool(instance.decisions.pool)
    seen = replay_journal(instance.lines)
    assert seen.differences == []
    again = InstanceDecisions(InstanceConfig(POOL, 16, 4, 64, 32, 2, 8))
    assert type(seen.modules["eviction"]) is type(again.eviction)
    pool = seen.modules["eviction"]._pool  # type: ignore[attr-defined]
    assert pool.keys() == instance.decisions.pool.keys()
    assert pool.eviction.beliefs() == instance.decisions.pool.eviction.beliefs()
    assert pool.of_all.beliefs() == instance.decisions.pool.of_all.beliefs()


def test_what_was_learned_changes_what_goes() -> None:
    """The replay decides otherwise without the fits that were adopted, so the test above is meaningful."""
    instance = Instance()
    for number in range(40):
        instance.request(0, 2, "chat")
        instance.request(1 + 2 * number, 2, "file")  # never asked for again, and newer than the chat
        instance.request(2 + 2 * number, 2, "file")
        instance.done(0)
    assert len(instance.decisions.pool.eviction.beliefs()) > 1
    kept = [line for line in instance.lines if '"c":"adopt"' not in line]
    assert len(kept) < len(instance.lines)
    assert replay_journal(instance.lines).different == 0
    assert replay_journal(kept).different > 0


def test_what_came_too_late_is_for_nobody() -> None:
    instance = Instance()
    for number in range(8):
        instance.request(number % 4, 4, "chat")
    assert instance.working
    instance.switch(CHOICES[2])
    before = instance.decisions.pool.eviction.beliefs()
    instance.done(0)
    assert instance.decisions.pool.eviction.beliefs() == before
    assert '"r":false' in instance.lines[-1]
    assert replay_journal(instance.lines).different == 0


def test_a_journal_holds_the_fit_of_every_policy_that_learns() -> None:
    codec = Codec(JOURNAL_TYPES)
    learning = 0
    for name in EVICTION_POLICIES.names:
        policy = EVICTION_POLICIES.make(name)
        if not isinstance(policy, LearningEviction):
            continue
        learning += 1
        for at in range(100):
            policy.stored([at], at, Traits(f"chat/{at % 2}"), [0])
            policy.used([at], at + 5.0, Traits(f"chat/{at % 2}"), [0])
        fits: list[Any] = []
        evictor = Evictor(policy, lambda work, _, fits=fits: fits.append(work()))
        evictor.learn(1e6)
        (learned,) = fits
        again = codec.decode(json.loads(json.dumps(codec.encode(learned))))
        assert again == learned, name
        evictor.adopt(again)
    assert learning
