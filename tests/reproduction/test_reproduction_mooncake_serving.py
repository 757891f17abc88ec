"""Mooncake's figures of whole systems: on small workloads, and the papers' words."""

from __future__ import annotations

import math
import random
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pinyon_lab.figures.serving import node
from pinyon_lab.papers import FIGURES, Basis, Result, Workload
from pinyon_lab.papers.mooncake.transfer import least_bytes_s
from pinyon_lab.pictures import svg
from pinyon_lab.traces import TraceRow
from tests.long import usually

SHARED = Path(__file__).resolve().parents[3] / "shared"
BLOCK = 512
OF_ONE = {"mooncake-fig1": "conversation", "mooncake-fig6": "toolagent", "mooncake-fig7": "synthetic"}
SERVED = [*OF_ONE, "mooncake-fig5", "mooncake-fig8", "mooncake-fig11", "mooncake-fig13", "mooncake-fig15"]
ALL = [*SERVED, "mooncake-eq2", "mooncake-fig14"]


def workload(name: str, requests: int = usually(36, long=60)) -> Workload:
    rng = random.Random(name)
    rows, now_s = [], 0.0
    for number in range(requests):
        now_s += rng.expovariate(1.0)
        blocks = (*range(rng.randint(1, 20)), *(10_000 + 100 * number + each for each in range(rng.randint(1, 30))))
        rows.append(TraceRow(now_s, BLOCK * len(blocks) - rng.randint(0, 500), rng.randint(1, 60), blocks))
    return Workload(name, rows, BLOCK, generated=name == "toolagent")


@cache
def make(name: str) -> Result:
    figure = FIGURES[name]
    told: list[str] = []
    result = figure.make([workload(each) for each in (*figure.needs, *figure.likes)], told.append)
    assert told or not figure.needs
    return result


@pytest.mark.parametrize("name", ALL)
def test_every_figure_is_made(name: str) -> None:
    result = make(name)
    keys = [column.key for column in result.columns]
    for row in result.rows:
        for key in keys:
            value = row[key]
            assert value is not None
            assert not isinstance(value, float) or math.isfinite(value), (key, row)
    assert result.claims
    assert {claim.basis for claim in result.claims} <= {Basis.MODELLED, Basis.CONSTRUCTION}
    ElementTree.fromstring(svg(result.picture))
    if name in SERVED:
        assert any("Modelled: LLaMA3-70B" in note for note in result.notes)


def test_a_machine_computes_at_half_of_its_peak() -> None:
    _, engine = node()
    flops = 80 * (4 * 8192**2 * 8192 + 22 * 8192 * 8192**2)
    assert engine.seconds([(0, 8192)], 0, 0) == pytest.approx(2 * flops / (8 * 312e12), rel=0.001)


def test_equation_2_is_where_fetching_and_computing_take_as_long() -> None:
    for prefix in (512, 8192, 100_000):
        bytes_s = least_bytes_s(8 * 312e12, prefix)
        compute_s = 80 * (4 * prefix**2 * 8192 + 22 * prefix * 8192**2) / (8 * 312e12)
        fetch_s = prefix * 80 * (2 * 8192 / 8) * 2 / bytes_s
        assert fetch_s == pytest.approx(compute_s)


def test_printed_values_of_eq2_and_fig14() -> None:
    assert [claim.agrees for claim in make("mooncake-eq2").claims] == [True, True]
    prefill, _ = make("mooncake-fig14").claims
    assert prefill.agrees


def test_replicas_are_counted_on_prefill_instances() -> None:
    rows = [row for row in make("mooncake-fig11").rows if row["workload"] == "conversation"]
    assert rows
    assert all(0 <= row["least"] <= row["mean"] <= row["most"] <= 8 for row in rows)  # type: ignore[operator]


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
@pytest.mark.parametrize("name", ALL)
def test_quotes_are_in_the_paper(name: str) -> None:
    text = plain((SHARED / "seeds" / "mooncake.txt").read_text())
    for claim in make(name).claims:
        assert plain(claim.said) in text


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("’", "'"))
