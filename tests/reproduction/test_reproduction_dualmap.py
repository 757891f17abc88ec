"""DualMap's figures: on small workloads, by arithmetic, and the paper's words."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pinyon_lab.papers import FIGURES, Result, Workload, dualmap
from pinyon_lab.pictures import svg
from pinyon_lab.traces import TraceRow

SHARED = Path(__file__).resolve().parents[3] / "shared"
STRUCTURE = ["dualmap-fig6", "dualmap-fig15", "dualmap-a4", "dualmap-table1"]


def workload(name: str) -> Workload:
    """Returns 4,000 requests that all begin with the same block.

    One request in three begins with a prefix of 6 blocks, one in three with a prefix of 13 blocks.
    """
    rows = []
    for number in range(4000):
        popular = (0, *range(10, 15)) if number % 3 == 0 else (0, *range(20, 32)) if number % 3 == 1 else (0,)
        blocks = (*popular, *range(1000 * number + 100, 1000 * number + 103))
        rows.append(TraceRow(float(number), 512 * len(blocks), 1, blocks))
    return Workload(name, rows, 512, generated=name == "toolagent")


@cache
def make(name: str) -> Result:
    figure = FIGURES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dualmap.structure, "PER_INSTANCE", 200)
        return figure.make([workload(each) for each in (*figure.needs, *figure.likes)], lambda _: None)


@pytest.mark.parametrize("name", STRUCTURE)
def test_every_figure_is_made(name: str) -> None:
    result = make(name)
    assert result.claims
    for row in result.rows:
        assert all(row[column.key] is not None for column in result.columns)
    ElementTree.fromstring(svg(result.picture))


def test_a_key_is_one_block_longer_than_what_is_hot() -> None:
    rows = make("dualmap-fig6").rows
    published = [row for row in rows if row["workload"] == "conversation" and row["rule"] == "published code"]
    lengths = {row["blocks"]: row["share"] for row in published}
    assert {2, 7, 14} <= set(lengths)
    assert sum(lengths.values()) == pytest.approx(1.0, abs=0.05)  # type: ignore[arg-type]
    assert all(0.25 < lengths[blocks] < 0.36 for blocks in (2, 7, 14)), lengths  # type: ignore[operator]


def test_the_second_choice_is_worth_most() -> None:
    assert [claim.agrees for claim in make("dualmap-fig15").claims] == [True, True]


def test_metadata_by_arithmetic() -> None:
    swapped, *others = make("dualmap-a4").claims
    assert (swapped.printed, swapped.ours, swapped.agrees) == ("9,632", "9,362", False)
    assert all(claim.agrees for claim in others)


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
@pytest.mark.parametrize("name", STRUCTURE)
def test_quotes_are_in_the_paper(name: str) -> None:
    text = plain((SHARED / "seeds" / "dualmap.txt").read_text())
    for claim in make(name).claims:
        assert plain(claim.said) in text


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("’", "'"))
