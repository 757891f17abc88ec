"""What every batching policy keeps, in whatever order: nobody is lost, admitted twice, or kept from free slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.batching import BATCHING_POLICIES, BatchRequest

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), st.integers(0, 9)),
        st.tuples(st.just("admit"), st.integers(-1, 4)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", BATCHING_POLICIES.names)
@given(events=EVENTS)
def test_requests_wait_run_and_leave_once(name: str, events: list[tuple[str, int]]) -> None:
    policy = BATCHING_POLICIES.make(name)
    waiting: set[int] = set()
    running: set[int] = set()
    for now, (event, number) in enumerate(events):
        if event == "enqueue":
            request = BatchRequest(number, 10 * number + 1, 5, arrived_s=float(now))
            if number in waiting | running:
                with pytest.raises(ValueError, match="enqueued already"):
                    policy.enqueue(request)
            else:
                policy.enqueue(request)
                waiting.add(number)
        elif event == "admit":
            chosen = policy.admit(number, float(now))
            assert len(chosen) == len(set(chosen)) == min(max(0, number), len(waiting))
            assert set(chosen) <= waiting
            waiting -= set(chosen)
            running |= set(chosen)
        else:
            assert policy.remove(number) == (number in waiting | running)
            waiting.discard(number)
            running.discard(number)
        assert (policy.waiting, policy.running) == (len(waiting), len(running))
