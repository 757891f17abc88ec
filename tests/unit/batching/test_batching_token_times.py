from __future__ import annotations

from pinyon.batching.token_times import SAMPLE_STEPS, TokenTimes


def test_a_sample_is_the_mean_of_its_tokens():
    times = TokenTimes()
    times.decoded(2, 0.01, 100, steps=SAMPLE_STEPS - 1)
    assert times.take(idle=False) == (0.0, 0.0, 0.0)
    times.decoded(4, 0.20, 300)
    twos, fours = 2 * (SAMPLE_STEPS - 1), 4
    tbt_ms, batch, kv_tokens = times.take(idle=False)
    assert abs(tbt_ms - (twos * 10 + fours * 200) / (twos + fours)) < 1e-9
    assert abs(batch - (twos * 2 + fours * 4) / (twos + fours)) < 1e-9
    assert abs(kv_tokens - (twos * 100 + fours * 300) / (twos + fours)) < 1e-9
    assert times.take(idle=True) == (0.0, 0.0, 0.0)


def test_fewer_steps_are_a_sample_when_nothing_is_decoded_more():
    times = TokenTimes()
    times.decoded(1, 0.03, 7)
    assert times.take(idle=False) == (0.0, 0.0, 0.0)
    assert times.take(idle=True) == (30.0, 1.0, 7.0)


def test_many_steps_at_once_count_as_they_would_one_by_one():
    once, each = TokenTimes(), TokenTimes()
    once.decoded(3, 0.25, 50, steps=2 * SAMPLE_STEPS)
    for _ in range(2 * SAMPLE_STEPS):
        each.decoded(3, 0.25, 50)
    assert once.take(idle=False) == each.take(idle=False)


def test_in_rounds_a_token_comes_after_a_whole_round():
    """The batches have four, two and two requests: in each round every request gets one token."""
    times = TokenTimes()
    for _ in range(SAMPLE_STEPS):
        for requests, seconds in ((4, 0.04), (2, 0.03), (2, 0.01)):
            times.decoded(requests, seconds, 900, running=8)
    tbt_ms, batch, kv_tokens = times.take(idle=False)
    assert abs(tbt_ms - 80) < 1e-9
    assert (batch, kv_tokens) == (8.0, 900.0)
