"""SkyWalker's figures in short runs, and the paper's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pinyon_lab.papers import FIGURES, Result, skywalker
from pinyon_lab.papers.skywalker.runs import RegionLoad
from pinyon_lab.pictures import svg

SHARED = Path(__file__).resolve().parents[3] / "shared"
SKYWALKER = [name for name in FIGURES if name.startswith("skywalker-")]


def short(load: RegionLoad) -> RegionLoad:
    """Returns the load with a tenth of its clients and 18 seconds."""
    return replace(load, clients=tuple((region, max(1, count // 10)) for region, count in load.clients), until_s=18.0)


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Result]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegionLoad, "quick", lambda load: replace(short(load), warm_s=5.0))
        patch.setattr(skywalker.serving, "LIMITS", (20, 50))
        patch.setattr(skywalker.sharing, "PROGRAMS", 150)
        yield {name: FIGURES[name].make((), lambda _: None, quick=True) for name in SKYWALKER}
    skywalker.runs._ran.cache_clear()


@pytest.mark.parametrize("name", SKYWALKER)
def test_every_figure_is_made(made: dict[str, Result], name: str) -> None:
    result = made[name]
    assert result.claims
    assert result.rows
    for row in result.rows:
        assert all(row[column.key] is not None for column in result.columns)
    ElementTree.fromstring(svg(result.picture))


def test_what_is_asked_for_is_there() -> None:
    assert set(SKYWALKER) == {f"skywalker-fig{number}" for number in ("3", "4b", "5", "6", "8", "9", "10")}


def test_fig_8_has_all_systems_and_workloads(made: dict[str, Result]) -> None:
    rows = made["skywalker-fig8"].rows
    assert len(rows) == len({(row["workload"], row["system"]) for row in rows}) == 4 * 8
    assert set(skywalker.serving.LOADS) == {"arena", "wildchat", "tree", "mixed-tree"}


def test_what_agrees_is_in_the_range(made: dict[str, Result]) -> None:
    """An order without the number is only an order."""
    claim = next(each for each in made["skywalker-fig8"].claims if "P90 TTFT" in each.said)
    for agrees, order, verdict in (
        (True, True, "agrees"),
        (False, True, "order agrees, outside the range"),
        (False, False, "differs"),
    ):
        assert replace(claim, agrees=agrees, order=order).verdict == verdict
    assert not claim.agrees, "a few clients do not queue"


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
@pytest.mark.parametrize("name", SKYWALKER)
def test_quotes_are_in_the_paper(made: dict[str, Result], name: str) -> None:
    text = plain((SHARED / "seeds" / "skywalker.txt").read_text())
    for claim in made[name].claims:
        assert plain(claim.said) in text, claim.said


def plain(text: str) -> str:
    """Returns the paper's text with each formula once: the extracted text has each twice, once as TeX."""
    text = re.sub(r"(\d+\.\d+)\1-", r"\1-", text)
    text = re.sub(r"(\d+(?:\.\d+)?)([×%])\1\\(?:times|%)", r"\1\2", text)
    return re.sub(r"\s+", " ", text.replace("’", "'"))
