"""A new batching policy takes over the waiting and running requests as they are."""

from __future__ import annotations

import pytest

from pinyon.batching import BATCHING_POLICIES, BatchRequest
from pinyon.decisions import Admission
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservations
from tests.worker_integrity import check_admission


def asked(number: int, letters: str) -> BatchRequest:
    keys = tuple(letters[: end + 1].encode().ljust(16) for end in range(len(letters)))
    return BatchRequest(number, 16 * len(keys), len(keys) + 1, keys, len(keys))


@pytest.mark.parametrize("choice", ["feather:chunk_blocks=1", "lpm", "most_in_time", "oracle:group_blocks=1"])
def test_who_gave_way_comes_first_under_the_next_policy_too(choice: str) -> None:
    pool = BlockPool(8, Lru())
    reservations = Reservations(pool, LeaseTable())
    admission = Admission(BATCHING_POLICIES.make("fcfs").policy, pool, reservations, 2, 0)
    for number, letters in enumerate(("aaa", "bbb")):
        admission.enqueue(asked(number, letters))
    first, second = admission.admit(0.0)
    admission.enqueue(asked(2, "a"))  # shares a prefix with the running request, is shorter, and came later
    admission.end(1)
    reservations.release(second.reservation.table, 1.0)
    admission.enqueue(asked(1, "bbb"))
    admission.switch(choice, 1.0)
    check_admission(admission)
    assert [grant.number for grant in admission.admit(1.0)] == [1]
    admission.end(0)
    reservations.release(first.reservation.table, 2.0)
    assert [grant.number for grant in admission.admit(2.0)] == [2]
    check_admission(admission)
