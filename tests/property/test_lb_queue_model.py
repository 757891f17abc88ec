"""The load balancer's queue with demands, priorities and put-backs, against lists that are searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.queue import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, RequestQueue
from tests.long import usually
from tests.queue_integrity import check_queue

TENANTS = "abc"
DEMANDS = range(3)
AGEING_S = 0.5
closed_sets = st.one_of(st.just(()), st.frozensets(st.sampled_from(DEMANDS)), st.lists(st.sampled_from(DEMANDS)))

Said = tuple[int, int, int, bool]
SAID = st.tuples(
    st.sampled_from([0, 1, 2, 30]), st.sampled_from([0, 0, 1, -2, 1000, -1000]), st.sampled_from(DEMANDS), st.booleans()
)
"""Tokens, priority, demand, and whether there is room."""


@dataclass(frozen=True)
class Asked:
    number: int
    tenant: str
    tokens: int
    entered_s: float
    priority: int
    demand: int
    order: int
    """The order of arrival; below 0: it was put back."""

    @property
    def due(self) -> tuple[float, bool, int]:
        return self.entered_s + self.priority * AGEING_S, self.order >= 0, abs(self.order)


class Lists:
    """The queue according to its documentation."""

    def __init__(self) -> None:
        self.waiting: list[Asked] = []
        self.starts: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.now = self.turn = 0

    def waits(self, tenant: str) -> bool:
        return any(each.tenant == tenant for each in self.waiting)

    def new_turn(self, tenant: str) -> None:
        self.turn += 1
        self.turns[tenant] = self.turn

    def add(self, asked: Asked) -> None:
        if not self.waits(asked.tenant):
            self.starts[asked.tenant] = max(self.now, self.starts.get(asked.tenant, 0))
            self.new_turn(asked.tenant)
        self.waiting.append(asked)

    def remove(self, asked: Asked) -> None:
        self.waiting.remove(asked)
        if not self.waiting:
            self.starts, self.now = {}, 0

    def next(self, closed: Collection[int]) -> Asked | None:
        could = [each for each in self.waiting if each.demand not in closed]
        if not could:
            return None
        tenant = min((each.tenant for each in could), key=lambda name: (self.starts[name], self.turns[name]))
        asked = min((each for each in could if each.tenant == tenant), key=lambda each: each.due)
        self.now = max(self.now, self.starts[tenant])
        self.starts[tenant] = self.now + asked.tokens
        self.new_turn(tenant)
        self.remove(asked)
        return asked

    def refund(self, tenant: str, tokens: int) -> None:
        self.starts[tenant] = self.starts.get(tenant, 0) - tokens


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.begin(2, 4)
        self.lists = Lists()
        self.reserved: dict[int, str] = {}
        self.running: list[Asked] = []
        self.now_s, self.last = 0.0, 0

    @initialize(slots=st.integers(1, 4), limit=st.sampled_from([1, 5, 40]))
    def begin(self, slots: int, limit: int) -> None:
        self.slots, self.limit = slots, limit
        self.queue = RequestQueue(slots, limit, AGEING_S)

    @property
    def waiting(self) -> list[Asked]:
        return self.lists.waiting

    def check_went_on(self, given_to: int | None, closed: Collection[int]) -> None:
        asked = self.lists.next(closed) if len(self.running) < self.slots else None
        assert given_to == (None if asked is None else asked.number)
        if asked is not None:
            self.running.append(asked)

    @rule(seconds=st.sampled_from([0.5, 1.0, 10.0]))
    def time_goes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(tenant=st.sampled_from(TENANTS))
    def reserve(self, tenant: str) -> None:
        self.last += 1
        held = Counter([*self.reserved.values(), *(each.tenant for each in self.waiting)])
        if len(self.running) + held.total() < self.slots + self.limit:
            assert self.queue.reserve(self.last, tenant, self.now_s) is None
        elif held and max(held.values()) >= held[tenant] + 2:
            out = self.queue.reserve(self.last, tenant, self.now_s)
            assert out is not None
            if out in self.reserved:
                loser = self.reserved.pop(out)
                assert not any(name == loser for number, name in self.reserved.items() if number > out)
            else:
                asked = next(each for each in self.waiting if each.number == out)
                loser = asked.tenant
                assert loser not in self.reserved.values()
                newest = max(each.order for each in self.waiting if each.tenant == loser)
                assert asked.order == newest, "whoever was put back is older than all others"
                self.lists.remove(asked)
            assert held[loser] == max(held.values())
        else:
            with pytest.raises(ResourceExhausted) as caught:
                self.queue.reserve(self.last, tenant, self.now_s)
            assert RETRY_AFTER_MIN_S <= caught.value.retry_after_s <= RETRY_AFTER_MAX_S
            return
        self.reserved[self.last] = tenant

    @rule(those=st.lists(st.tuples(st.sampled_from(TENANTS), SAID), min_size=1, max_size=6))
    def come(self, those: list[tuple[str, Said]]) -> None:
        for tenant, said in those:
            self.reserve(tenant)
            if self.last in self.reserved:
                self.enter(len(self.reserved) - 1, said)

    @rule(pick=st.integers(0, 99), said=SAID)
    def enter(self, pick: int, said: Said) -> None:
        if not self.reserved:
            return
        tokens, priority, demand, room = said
        number = sorted(self.reserved)[pick % len(self.reserved)]
        tenant = self.reserved.pop(number)
        at_once = self.queue.enter(number, tokens, self.now_s, priority=priority, demand=demand, open=room)
        asked = Asked(number, tenant, max(1, tokens), self.now_s, priority, demand, self.last)
        self.last += 1
        same = any(each.demand == demand for each in self.waiting)
        assert at_once == (room and len(self.running) < self.slots and not same)
        if at_once:
            self.running.append(asked)
        else:
            self.lists.add(asked)

    @rule(closed=closed_sets)
    def next(self, closed: Collection[int]) -> None:
        self.check_went_on(self.queue.next(self.now_s, closed), closed)

    @rule(closed=closed_sets)
    def all_that_can(self, closed: Collection[int]) -> None:
        """Lets all requests go that can, as the caller does after each event."""
        while (given_to := self.queue.next(self.now_s, closed)) is not None:
            self.check_went_on(given_to, closed)
        self.check_went_on(None, closed)
        check_queue(self.queue, closed)

    @rule(pick=st.integers(0, 99), closed=closed_sets)
    def leave(self, pick: int, closed: Collection[int]) -> None:
        if self.running:
            del self.running[pick % len(self.running)]
            self.check_went_on(self.queue.leave(self.now_s, closed), closed)

    @rule(pick=st.integers(0, 99))
    def put_back(self, pick: int) -> None:
        if not self.running:
            return
        asked = self.running.pop(pick % len(self.running))
        self.queue.put_back(
            asked.number, asked.tenant, asked.tokens, asked.entered_s, priority=asked.priority, demand=asked.demand
        )
        self.lists.refund(asked.tenant, asked.tokens)
        self.last += 1
        *said, _ = (getattr(asked, name) for name in Asked.__dataclass_fields__)
        self.lists.add(Asked(*said, -self.last))

    @rule(closed=closed_sets, count=st.integers(1, 20))
    def some_leave(self, closed: Collection[int], count: int) -> None:
        """Cancels some requests, so that the queue is sometimes empty."""
        for _ in range(count):
            self.leave(0, closed)

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        numbers = [*self.reserved, *(each.number for each in self.waiting)]
        if not numbers:
            return
        number = numbers[pick % len(numbers)]
        assert self.queue.cancel(number, self.now_s)
        assert not self.queue.cancel(number, self.now_s)
        if self.reserved.pop(number, None) is None:
            self.lists.remove(next(each for each in self.waiting if each.number == number))

    @invariant()
    def counts(self) -> None:
        queue = self.queue
        assert (queue.in_flight, queue.queued) == (len(self.running), len(self.waiting))
        assert queue.waiting_demands == {each.demand for each in self.waiting}
        assert queue.can_go_on == (bool(self.waiting) and len(self.running) < self.slots)
        everybody = len(self.running) + len(self.reserved) + len(self.waiting)
        assert queue.has_spare == (len(self.running) < self.slots and everybody < self.slots + self.limit)
        check_queue(queue, DEMANDS)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=usually(40, long=3000), stateful_step_count=40, deadline=None)
