"""Samples of block keys, by the words of their definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.block_keys import chain_block_keys, namespace, pack_keys
from pinyon.core.key_sample import EVERY_MAX, is_sample, key_sample, sample_every, sampled_keys

EVERY = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
KEYS = st.lists(st.binary(min_size=16, max_size=16), max_size=40)


@pytest.mark.parametrize(
    ("stride_tokens", "block_tokens", "every"),
    [(128, 16, 8), (128, 512, 1), (1, 16, 1), (128, 128, 1), (255, 128, 1), (256, 128, 2), (200, 16, 8), (4096, 1, 64)],
)
def test_how_many_keys_a_stride_is(stride_tokens, block_tokens, every):
    assert sample_every(stride_tokens, block_tokens) == every


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_stride_is_no_longer_than_asked_unless_a_block_is(stride_tokens, block_tokens):
    every = sample_every(stride_tokens, block_tokens)
    assert is_sample(every)
    assert every == 1 or every * block_tokens <= stride_tokens
    assert every == EVERY_MAX or 2 * every * block_tokens > stride_tokens


@given(st.integers(1, 70))
def test_samples_are_the_powers_of_two(every):
    assert is_sample(every) == (every in {1, 2, 4, 8, 16, 32, 64})


@given(KEYS, EVERY)
def test_packed_or_not_the_sample_is_the_same(keys, every):
    wanted = [key for key in keys if key[15] % every == 0]
    assert key_sample(pack_keys(keys), every) == pack_keys(wanted)
    assert list(sampled_keys(keys, every)) == wanted


@given(KEYS, EVERY, EVERY)
def test_samples_nest(keys, one, other):
    packed = pack_keys(keys)
    assert key_sample(key_sample(packed, one), other) == key_sample(packed, max(one, other))


@given(st.integers(0, 700), EVERY)
def test_of_a_prompt_it_is_the_last_block_of_each_stride(blocks, every):
    keys = chain_block_keys(namespace("m", "l", "t"), bytes(4 * blocks), 1)
    assert key_sample(pack_keys(keys), every) == pack_keys(keys[every - 1 :: every])
