"""The load balancer's queue against a list that anybody understands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.queue import RequestQueue

STEPS = st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.integers(0, 9)), max_size=60)


@given(st.integers(1, 4), st.integers(0, 4), STEPS)
def test_the_queue_is_a_list(slots: int, limit: int, steps: list[tuple[str, int]]) -> None:
    queue = RequestQueue(slots, limit)
    running: list[int] = []
    waiting: list[int] = []
    now_s, last = 0.0, 0
    for what, pick in steps:
        now_s += 0.5
        if what == "enter":
            last += 1
            if len(running) < slots:
                assert queue.enter(last, now_s)
                running.append(last)
            elif len(waiting) < limit:
                assert not queue.enter(last, now_s)
                waiting.append(last)
            else:
                with pytest.raises(ResourceExhausted) as caught:
                    queue.enter(last, now_s)
                assert caught.value.retry_after_s
        elif what == "leave" and running:
            del running[pick % len(running)]
            given_to = queue.leave(now_s)
            assert given_to == (waiting[0] if waiting else None)
            if waiting:
                running.append(waiting.pop(0))
        elif what == "cancel":
            known = [*waiting, *running, last + 1]
            number = known[pick % len(known)]
            assert queue.cancel(number, now_s) is (number in waiting)
            if number in waiting:
                waiting.remove(number)
        assert (queue.in_flight, queue.queued) == (len(running), len(waiting))
        queue.check_integrity()
    while running:
        running.pop()
        if queue.leave(now_s) is not None:
            running.append(waiting.pop(0))
    assert (queue.in_flight, queue.queued) == (0, 0)


def test_misuse_is_an_error_and_changes_nothing() -> None:
    queue = RequestQueue(1, 2)
    with pytest.raises(ValueError, match="nobody"):
        queue.leave(0.0)
    assert queue.enter(1, 0.0)
    assert not queue.enter(2, 0.0)
    with pytest.raises(ValueError, match="2 waits"):
        queue.enter(2, 1.0)
    queue.check_integrity()
    assert (queue.in_flight, queue.queued) == (1, 1)
