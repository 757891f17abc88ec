"""The gaps, excuses and growth by which the chaos runs judge, from hand-made records."""

from __future__ import annotations

import pytest

from tests.chaos.http_exchange import text_of
from tests.chaos.memory import growth
from tests.chaos.rows import Row, gap_s, rows_of
from tests.chaos.traffic import Record
from tests.http_client import Reply


def record(client: int, started_s: float, ended_s: float, outcome: str = "ok", size: str = "2 KB", **values) -> Record:
    return Record(client, size, False, started_s, ended_s, outcome, **values)


def test_a_gap_is_the_longest_wait_for_a_request_after_the_event():
    records = [
        record(0, 9.0, 13.0),  # sent before
        record(0, 10.0, 14.0),
        record(0, 10.5, 11.0),  # the first of client 0 that is answered
        record(1, 10.0, 11.5, "failed"),
        record(1, 11.0, 11.8),
    ]
    assert gap_s(records, [0, 1], 10.0) == pytest.approx(1.8)
    assert gap_s(records, [0], 10.0) == pytest.approx(1.0)


def test_a_client_that_is_never_answered_has_no_gap():
    assert gap_s([record(0, 9.0, 11.0), record(0, 10.0, 12.0, "failed")], [0], 10.0) is None


def rows(records: list[Record], fault: str = "freeze") -> list[Row]:
    return rows_of(("split", "lb-0", fault), records, 10.0, (10.0, 15.0))


def test_only_what_the_victim_alone_had_is_excused():
    records = [
        record(0, 9.5, 9.8, door="lb-0", began_s=9.6),
        record(0, 9.5, 15.2, door="lb-0", began_s=9.9),  # half of the answer was out when lb-0 froze
        record(0, 9.5, 15.3, door="lb-0", began_s=15.1),  # the client could have chosen the other balancer
        record(0, 10.1, 11.0, door="lb-1", began_s=10.5),
        record(0, 15.0, 15.1),
        record(1, 9.9, 15.2, door="lb-1", began_s=9.95),  # slow for another reason than the freeze of lb-0
        record(1, 10.0, 10.2),
        record(1, 15.0, 15.3),
    ]
    (row,) = rows(records)
    assert (row.requests, row.failed, row.only_copy) == (8, 0, 1)
    assert row.worst_s == pytest.approx(5.8)
    assert not row.good


def test_only_requests_that_died_with_their_balancer_are_excused():
    records = [
        record(0, 9.9, 10.0, "died"),
        record(0, 10.0, 10.1, "failed", detail="HTTP 503"),
        record(0, 10.0, 10.1, "failed", detail="HTTP 503"),
        record(0, 10.0, 10.1, "wrong", detail="another text"),
        record(0, 10.0, 10.3),
        record(0, 15.0, 15.1),
    ]
    (row,) = rows(records, "kill")
    assert (row.failed, row.wrong, row.only_copy) == (3, 1, 1)
    assert row.details == ["2 × HTTP 503", "1 × another text"]
    assert not row.good


def test_sizes_have_own_rows_and_calm_is_before_the_fault():
    records = [
        record(0, 8.0, 8.5),
        record(0, 10.0, 10.2),
        record(0, 15.0, 15.1),
        record(1, 8.0, 8.9, size="200 KB"),
        record(1, 9.5, 9.6, size="200 KB"),
        record(1, 10.0, 10.9, size="200 KB"),
        record(1, 15.0, 15.4, size="200 KB"),
    ]
    small, large = rows(records)
    assert (small.calm_s, large.calm_s) == (0.5, pytest.approx(0.9))
    assert (small.size, large.size) == ("2 KB", "200 KB")
    assert small.gap_s == pytest.approx(0.2)
    assert large.gap_s == pytest.approx(0.9)
    assert small.silence_s == pytest.approx(4.9)
    assert small.good
    assert large.good


def test_growth_is_a_line_through_all_after_the_first_quarter():
    requests = list(range(0, 10_001, 100))
    warming = [50_000_000 + min(count, 2_400) * 10_000 for count in requests]
    flat = growth("flat", requests, warming)
    assert abs(flat.per_10k) < 1e-9
    assert flat.good
    leaking = growth("leak", requests, [size + 200 * count for size, count in zip(warming, requests, strict=True)])
    assert leaking.bytes_per_request == pytest.approx(200)
    assert not leaking.good


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\ndata: [DONE]\n\n',
        b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n',
    ],
    ids=["cut", "unfinished", "error"],
)
def test_a_stream_that_does_not_end_well_is_no_answer(body):
    with pytest.raises(ValueError, match=r"stream"):
        text_of(Reply(200, {}, body))
