"""The invariants of every batching policy: no request is lost, admitted twice, or kept from room and slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.batching import BATCHING_POLICIES, BatchRequest, BlockNeed, StepSeen

NUMBERS = st.integers(0, 9)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), NUMBERS, st.integers(1, 5)),
        st.tuples(st.just("admit"), st.integers(-1, 4), st.integers(0, 12)),
        st.tuples(st.just("remove"), NUMBERS, st.just(0)),
        st.tuples(st.just("observe"), NUMBERS, st.just(0)),
    ),
    max_size=60,
)


def request(number: int, blocks: int, now: int) -> BatchRequest:
    """Makes a request. Every third is decoded elsewhere; every second has one block that is held and used by others."""
    return BatchRequest(number, 10, blocks, (b"k",), reusable=number % 2, decodes=number % 3 > 0, arrived_s=float(now))


class Books:
    """A record of the blocks that each request holds."""

    def __init__(self) -> None:
        self.running: dict[int, BatchRequest] = {}

    def need(self, request: BatchRequest) -> BlockNeed:
        return BlockNeed(request.reusable, request.blocks - request.reusable)

    def behind(self, number: int) -> int:
        return sum(request.blocks for other, request in self.running.items() if other > number)


@pytest.mark.parametrize("name", BATCHING_POLICIES.names)
@given(events=EVENTS)
def test_requests_wait_run_and_leave_once(name: str, events: list[tuple[str, int, int]]) -> None:
    books = Books()
    policy = BATCHING_POLICIES.make(name).policy(books)
    waiting: dict[int, BatchRequest] = {}
    running = books.running
    for now, (event, number, blocks) in enumerate(events):
        if event == "enqueue":
            one = request(number, blocks, now)
            if number in waiting or number in running:
                with pytest.raises(ValueError, match="enqueued already"):
                    policy.enqueue(one)
            else:
                policy.enqueue(one)
                waiting[number] = one
        elif event == "admit":
            slots, room = number, blocks
            while chosen := policy.admit(slots, room, float(now)):
                assert len(chosen) == len(set(chosen))
                for each in chosen:
                    running[each] = one = waiting.pop(each)
                    room -= books.need(one).missing
                    slots -= one.decodes
                assert room >= 0
                assert slots >= min(0, number)
            if room == 12:  # enough for any of them
                assert all(one.decodes for one in waiting.values())
                assert slots <= 0 or not waiting
        elif event == "remove":
            assert policy.remove(number) == (number in waiting or number in running)
            waiting.pop(number, None)
            running.pop(number, None)
        else:
            policy.observe(StepSeen(number, 7, 0.01))
        assert (policy.waiting, policy.running) == (len(waiting), len(running))
        assert policy.claimant() is None or event != "admit" or policy.claimant() in waiting
