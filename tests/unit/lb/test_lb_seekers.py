"""Requests that may wait for an instance to come, and hold a slot meanwhile."""

from __future__ import annotations

import pytest

from pinyon.core.errors import Unavailable
from pinyon.frontdoor.request_loop import SHARE, Seekers


def test_those_who_chose_regions_hold_a_share_of_the_slots() -> None:
    seekers = Seekers(3 * SHARE)
    for _ in range(3):
        seekers.begin(chosen=True)
    with pytest.raises(Unavailable):
        seekers.begin(chosen=True)
    for _ in range(20):
        seekers.begin(chosen=False)
    for _ in range(20):
        seekers.end(chosen=False)
    with pytest.raises(Unavailable):
        seekers.begin(chosen=True)
    for _ in range(10):
        seekers.end(chosen=True)
        seekers.begin(chosen=True)
