"""Markers are found as a regular alternation would find them, longest first, in far fewer steps."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pinyon.model.markers import DEPTH_MAX, Markers

SHORT = st.text("ab|<.", min_size=1, max_size=4)


def flat(markers: list[str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(re.escape(each) for each in sorted(markers, key=len, reverse=True))})")


@given(markers=st.lists(SHORT, min_size=1, max_size=12), text=st.text("ab|<.\n", max_size=40))
@example(markers=["a" * size for size in range(1, 3 * DEPTH_MAX)], text="a" * 500)
@example(markers=["ab" * size + end for size in range(1, 2 * DEPTH_MAX) for end in ("", "c")], text="ab" * 500 + "c")
def test_the_longest_is_found(markers: list[str], text: str) -> None:
    ours = Markers(["", *markers])
    assert ours.split(text) == flat(markers).split(text)
    found = ours.pattern.search(text) is not None
    assert found == any(each in text for each in markers)
    assert not found or ours.work([text]) > 0


def ways_at_once(pattern: str) -> int:
    """Returns the most alternatives of any group of a pattern without escapes and classes."""
    most, open_groups = 1, [1]
    for char in pattern:
        if char == "(":
            open_groups.append(1)
        elif char == ")":
            open_groups.pop()
        elif char == "|":
            open_groups[-1] += 1
            most = max(most, open_groups[-1])
    return most


@pytest.mark.parametrize("count", [20, 1000])
def test_the_cost_of_a_place_does_not_grow_with_the_markers(count: int) -> None:
    markers = [f"<SPECIAL_{number}>" for number in range(count)]
    assert ways_at_once(Markers(markers).pattern.pattern) <= len("0123456789>")
    assert Markers(markers).marks == ("<SPECIAL_",)


def test_work_is_of_places_where_a_marker_may_begin() -> None:
    markers = Markers(["<|a|>", "<|b|>", "[x]"])
    assert markers.work(["plain text < | >", "more"]) == 0
    assert markers.work(["<|" * 4000]) == 1000
    assert markers.work(["<|" * 3, "[x] "]) == 1
