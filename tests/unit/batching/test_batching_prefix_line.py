"""Tests of the order in which requests get KV memory by shared prefix, and of how long a request is passed over."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import BATCHING_POLICIES, BatchingPolicy, BatchRequest
from tests.unit.batching.books import Books, keys_of


def request(number: int, letters: str, now_s: float = 0.0, deadline_s: float = 0.0) -> BatchRequest:
    keys = keys_of(letters)
    return BatchRequest(number, 16 * len(keys), len(keys), keys, len(keys), arrived_s=now_s, deadline_s=deadline_s)


def feather(books: Books, options: str = "") -> BatchingPolicy:
    return BATCHING_POLICIES.make(f"feather:chunk_blocks=1{options}").policy(books)


def test_who_shares_most_with_those_that_run_comes_first() -> None:
    policy = feather(Books())
    for number, letters in enumerate(("aaaa", "bbbb", "aacc", "aaaa")):
        policy.enqueue(request(number, letters))
    assert policy.admit(9, 100, 0.0) == [0, 3, 2, 1]


def test_by_tip_a_long_sharer_comes_before_a_short_stranger() -> None:
    orders = {}
    for by_tip in ("false", "true"):
        policy = feather(Books(), f",by_tip={by_tip}")
        policy.enqueue(request(0, "aa"))
        assert policy.admit(9, 100, 0.0) == [0]
        policy.enqueue(request(1, "aaxyz"))
        policy.enqueue(request(2, "b"))
        orders[by_tip] = policy.admit(9, 100, 0.0)
    assert orders == {"false": [2, 1], "true": [1, 2]}


def test_the_prefix_of_ended_requests_counts_no_more() -> None:
    policy = feather(Books())
    for number, letters in enumerate(("aaaa", "bbbb", "aaaa")):
        policy.enqueue(request(number, letters))
    assert policy.admit(1, 100, 0.0) == [0]
    policy.remove(0)
    assert policy.admit(1, 100, 0.0) == [1]


def test_levels_are_of_so_many_blocks() -> None:
    policy = BATCHING_POLICIES.make("feather:chunk_blocks=2").policy(Books())
    for number, letters in enumerate(("aaaa", "bbb", "aab")):
        policy.enqueue(request(number, letters))
    # A level has two blocks: b misses one level, the others none.
    assert policy.admit(9, 100, 0.0) == [1, 2, 0]


def test_who_may_reuse_nothing_does_not_come_before_all_others() -> None:
    """The request takes most room: without levels it would miss none, and without room for it no request would go."""
    policy = feather(Books())
    policy.enqueue(request(0, "aaaa"))
    assert policy.admit(9, 100, 0.0) == [0]
    policy.enqueue(request(1, "aaaab"))
    policy.enqueue(replace(request(2, "cdefghijkl"), reusable=0))
    assert policy.admit(9, 8, 0.0) == [1]


def test_nobody_takes_what_the_next_one_waits_for() -> None:
    books = Books()
    policy = feather(books)
    for number, letters in enumerate(("aaaa", "aaaa", "b")):
        policy.enqueue(request(number, letters))
    assert policy.admit(9, 4, 0.0) == [2]  # request 2 misses one level, the others four
    assert policy.admit(9, 3, 0.0) == []
    assert policy.admit(9, 4, 0.0) == [0]


def test_who_was_passed_over_for_too_long_is_next() -> None:
    policy = feather(Books(), ",passed_over_s=5")
    policy.enqueue(request(0, "aaaa"))
    policy.enqueue(request(1, "bbbb"))
    assert policy.admit(1, 100, 0.0) == [0]
    now_s, number = 0.0, 2
    order = []
    while 1 not in order:
        policy.enqueue(request(number, "aaaa", now_s))
        order += policy.admit(1, 100, now_s)
        number, now_s = number + 1, now_s + 1.0
    assert order == [2, 3, 4, 5, 6, 1]  # request 2 passed request 1 at 0 s


def test_the_limit_is_tied_to_the_deadline() -> None:
    policy = feather(Books(), ",passed_over_s=60")
    policy.enqueue(request(0, "aaaa"))
    policy.enqueue(request(1, "bbbb", deadline_s=4.0))
    assert policy.admit(1, 100, 0.0) == [0]
    policy.enqueue(request(2, "aaaa"))
    assert policy.admit(1, 100, 0.0) == [2]
    policy.enqueue(request(3, "aaaa"))
    assert policy.admit(1, 100, 2.0) == [1]


def test_who_gave_way_comes_first() -> None:
    policy = feather(Books())
    for number, letters in enumerate(("aaaa", "bbbb")):
        policy.enqueue(request(number, letters))
    assert policy.admit(2, 100, 0.0) == [0, 1]
    policy.remove(1)
    policy.enqueue(request(1, "bbbb"))
    policy.enqueue(request(2, "aaaa"))
    assert policy.admit(1, 100, 0.0) == [1]
    assert policy.admit(1, 100, 0.0) == [2]


@settings(max_examples=60, deadline=None)
@given(random=st.randoms(use_true_random=True), limit_s=st.integers(1, 20))
def test_nobody_is_passed_over_longer_than_the_limit(random, limit_s: int) -> None:
    """Each second admits one request, from a queue that never ends."""
    policy = feather(Books(), f",passed_over_s={limit_s}")
    number = 0
    since_s: dict[int, float] = {}
    waiting: set[int] = set()
    for now_s in range(120):
        for _ in range(random.choice([0, 1, 1, 2])):
            policy.enqueue(request(number, random.choice("aaab") * random.randint(1, 5), now_s))
            waiting.add(number)
            number += 1
        due = [each for each, began_s in since_s.items() if each in waiting and now_s - began_s >= limit_s]
        chosen = policy.admit(1, 100, float(now_s))
        for each in chosen:
            waiting.remove(each)
            # Of the requests that are due, the one that waited longest goes first, and no other request goes.
            assert not due or since_s[each] == min(since_s[other] for other in due)
            for other in waiting:
                if other < each:
                    since_s.setdefault(other, now_s)
            policy.remove(each)


def test_prompts_for_other_instances_pass_nobody_without_end() -> None:
    """A request of 30 blocks comes each second and takes three; between them there is never room for 60."""
    books = Books()
    policy = feather(books)
    ends: dict[int, float] = {}
    requests: dict[int, BatchRequest] = {}
    victim = 10_000
    for second in range(60):
        now_s = float(second)
        for number in [each for each, end_s in ends.items() if end_s <= now_s]:
            policy.remove(number)
            del books.held[number], ends[number]
        number = second if second < 5 else victim + second
        requests[number] = replace(request(number, "x" * 30, now_s), decodes=False)
        policy.enqueue(requests[number])
        if second == 5:
            requests[victim] = request(victim, "y" * 60, now_s, now_s + 8.0)
            policy.enqueue(requests[victim])
        while chosen := policy.admit(16, 100 - sum(books.held.values()), now_s):
            for each in chosen:
                books.held[each] = requests[each].blocks
                ends[each] = now_s + 3.0
        if victim in books.held:
            break
    # The bound is half of the time to the deadline, and the time until earlier requests have ended.
    assert second <= 5 + 4 + 3 + 1
