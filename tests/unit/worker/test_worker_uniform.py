"""Random numbers that are the same on every instance and in every version, in Python and compiled."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.uniform import uniform


def splitmix64(state):
    """Yields the numbers of the published generator, step by step (Steele, Lea, Flood, 2014, section 4)."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def expected(seed, index):
    first = next(splitmix64(seed % 2**64))
    skipped = (first + index * 0x9E3779B97F4A7C15) % 2**64
    return (next(islice(splitmix64(skipped), 1, None)) >> 11) / 2**53


def test_the_generator_is_the_published_one():
    assert next(splitmix64(0)) == 0xE220A8397B1DCDAF  # other implementations begin with this number
    assert next(splitmix64(1234567)) == 6457827717110365317


@given(st.integers(0, 2**64 - 1), st.one_of(st.integers(0, 200), st.integers(0, 2**95)))
def test_numbers_are_of_seed_and_index(seed, index):
    assert uniform(seed, index) == expected(seed, index)


@pytest.mark.parametrize("index", [2**32, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**95])
def test_indices_at_the_edges_of_machine_numbers(index):
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        assert uniform(seed, index) == expected(seed, index)


def test_numbers_are_fixed_for_good():
    """A resumed request draws the same numbers on another version."""
    assert [uniform(seed, index) for seed, index in ((0, 0), (1, 2), (2**63, 7 << 32))] == [
        0.7012121095215252,
        0.7774369184800852,
        0.4530073138376045,
    ]
