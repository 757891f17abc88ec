"""Who may wait for somebody to come, and holds a slot meanwhile."""

from __future__ import annotations

import contextlib

import pytest

from pinyon.core.errors import Unavailable
from pinyon.frontdoor.seekers import SHARE, Seekers


def test_those_who_chose_regions_hold_a_share_of_the_slots() -> None:
    seekers = Seekers(3 * SHARE)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(seekers.one(chosen=True))
        with pytest.raises(Unavailable), seekers.one(chosen=True):
            raise AssertionError("there are too many")
        for _ in range(20):
            stack.enter_context(seekers.one(chosen=False))
    with pytest.raises(ZeroDivisionError), seekers.one(chosen=True):
        raise ZeroDivisionError
    for _ in range(10):
        with seekers.one(chosen=True):
            pass
