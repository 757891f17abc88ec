"""Times of vLLM's steps and requests, as reports to the conductor."""

from __future__ import annotations

import pytest

from pinyon.vllm.times import RequestTimes, Times


def placed(arrived_s: float = 1.0) -> RequestTimes:
    return RequestTimes(arrived_s, 8, placed_as="p", number=7)


def test_a_first_token_has_its_time_in_parts() -> None:
    times, request = Times("x", 4), placed()
    times.arrived(request)
    request.load_begun(1.5)
    request.load_ended(2.0, 1, 4)
    times.step(1, 3.0, [(request, 4, 4)], 1, 0, 0)
    times.step_ended(1, 3.25)
    news = times.take()
    assert (
        list(news.begun_decode_request_ids)
        == list(news.begun_prefill_request_ids)
        == list(news.ended_prefill_request_ids)
        == ["p"]
    )
    (first,) = news.first_tokens
    assert first.placement_number == 7
    assert news.prefills[0].compute_us == 250_000
    assert news.prefills[0].fetch_us == 500_000
    assert news.prefills[0].computed_tokens == 4


def test_the_first_of_several_choices_reports_for_all() -> None:
    times, choices = Times("x", 4), [placed(), placed()]
    for each in choices:
        times.arrived(each)
    times.step(1, 3.0, [(each, 0, 8) for each in choices], 2, 0, 0)
    times.step_ended(1, 4.0)
    times.ended(choices[0])
    news = times.take()
    assert (
        list(news.begun_decode_request_ids)
        == list(news.begun_prefill_request_ids)
        == list(news.ended_prefill_request_ids)
        == ["p"]
    )
    assert len(news.first_tokens) == 1
    assert not news.ended_decode_request_ids, "the other choice decodes"
    times.ended(choices[1])
    assert list(times.take().ended_decode_request_ids) == ["p"]


@pytest.mark.parametrize("decodes", [False, True])
def test_each_side_of_a_pair_reports_its_part(decodes: bool) -> None:
    times = Times("x", 4)
    request = RequestTimes(1.0, 8, "p", 7, computes=not decodes, decodes=decodes, before_s=2.0)
    times.arrived(request)
    times.step(1, 3.0, [(request, 4, 4)], 1, 0, 0)
    times.step_ended(1, 3.5)
    times.ended(request)
    news = times.take()
    part = ["p"] if decodes else []
    assert list(news.begun_decode_request_ids) == list(news.ended_decode_request_ids) == part
    part = [] if decodes else ["p"]
    assert list(news.begun_prefill_request_ids) == list(news.ended_prefill_request_ids) == part
    assert [each.ttft_us for each in news.first_tokens] == ([4_500_000] if decodes else [])
    assert len(news.prefills) == 1


def test_news_of_another_step_ends_none() -> None:
    times, request = Times("x", 4), placed()
    times.arrived(request)
    times.step(1, 2.0, [], 0, 0, 0)  # its news are lost
    times.step(2, 3.0, [(request, 0, 8)], 1, 0, 0)
    times.step_ended(0, 3.1)  # of one that computes nothing
    assert not times.take().prefills
    times.step_ended(2, 4.0)
    assert times.take().prefills[0].compute_us == 1_000_000


@pytest.mark.parametrize("first", [0, 1])
def test_aborted_choices_leave_nothing_begun(first: int) -> None:
    times, choices = Times("x", 4), [placed(), placed()]
    for each in choices:
        times.arrived(each)
    times.ended(choices[first])
    times.ended(choices[1 - first])
    news = times.take()
    assert list(news.ended_prefill_request_ids) == list(news.ended_decode_request_ids) == ["p"]
