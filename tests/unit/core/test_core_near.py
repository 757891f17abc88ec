from __future__ import annotations

import pytest

from pinyon.core.near import did_you_mean


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("placment", " (did you mean 'placement'?)"),
        ("Service-Order", " (did you mean 'service_order'?)"),
        ("colour", ""),
        ("", ""),
        ("placement" * 100, ""),
    ],
)
def test_near_word_is_named(word, hint):
    assert did_you_mean(word, ("placement", "service_order")) == hint


def test_nothing_known_is_near_nothing():
    assert did_you_mean("placement", ()) == ""
