"""SkyWalker's figures in short runs."""

from __future__ import annotations

from dataclasses import replace

from pinyon_lab.papers import FIGURES, skywalker
from tests.reproduction.small import made


def test_what_is_asked_for_is_there() -> None:
    found = {name for name in FIGURES if name.startswith("skywalker-")}
    assert found == {f"skywalker-fig{number}" for number in ("3", "4b", "5", "6", "8", "9", "10")}


def test_fig_8_has_all_systems_and_workloads() -> None:
    rows = made("skywalker")["skywalker-fig8"].rows
    assert len(rows) == len({(row["workload"], row["system"]) for row in rows}) == 4 * 8
    assert set(skywalker.serving.LOADS) == {"arena", "wildchat", "tree", "mixed-tree"}


def test_what_agrees_is_in_the_range() -> None:
    """An order without the number is only an order."""
    claim = next(each for each in made("skywalker")["skywalker-fig8"].claims if "P90 TTFT" in each.said)
    for agrees, order, verdict in (
        (True, True, "agrees"),
        (False, True, "order agrees, outside the range"),
        (False, False, "differs"),
    ):
        assert replace(claim, agrees=agrees, order=order).verdict == verdict
    assert not claim.agrees, "a few clients do not queue"
