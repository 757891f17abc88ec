"""DualMap's figures of whole systems on small workloads, and the paper's words."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pinyon_lab.papers import FIGURES, Result, Workload, dualmap
from pinyon_lab.papers.dualmap.runs import DECODING, PREFILL_ONLY, DualMapSystem, goodput, load_of, ran
from pinyon_lab.pictures import svg
from pinyon_lab.traces import TraceRow

SHARED = Path(__file__).resolve().parents[3] / "shared"
FIGURES_OF = ("fig1", "fig3", "fig4", "fig5", "fig8", "fig10", "fig11", "fig12", "fig13", "a6")
SERVING = [f"dualmap-{name}" for name in FIGURES_OF]


def workload(name: str, count: int = 70) -> Workload:
    rng, rows = random.Random(name), []
    for number in range(count):
        first = rng.choice([0, 0, 0, 1 + number % 7])
        shared = [100 * first + each for each in range(1, rng.randint(2, 8))]
        own = [1000 * number + 1000 + each for each in range(rng.randint(1, 9))]
        blocks = (first, *shared, *own)
        rows.append(TraceRow(number / 10, 512 * len(blocks) - rng.randint(0, 500), rng.randint(1, 60), blocks))
    return Workload(name, rows, 512, generated=name == "toolagent")


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dualmap.runs, "REQUESTS", {"conversation": 70, "toolagent": 70})
        patch.setattr(dualmap.runs, "SEEDS", 1)
        patch.setattr(dualmap.runs, "SAMPLE_S", 0.5)
        for module in (dualmap.runs, dualmap.serving, dualmap.elastic):
            patch.setattr(module, "WARM_UP", 20)
        patch.setattr(dualmap.serving, "RATES", dict.fromkeys(dualmap.serving.RATES, (6.0, 20.0)))
        patch.setattr(dualmap.elastic, "SIZES", (8, 16))
        patch.setattr(dualmap.elastic, "REQUESTS_EACH", 15)
        patch.setattr(dualmap.elastic, "RATES_EACH", (2.0,))
        patch.setattr(dualmap.elastic, "CALM_S", 60.0)
        yield
    dualmap.runs._ran.cache_clear()


@pytest.fixture(scope="module")
def made(small: None) -> dict[str, Result]:
    results = {}
    for name in SERVING:
        figure = FIGURES[name]
        count = 240 if name == "dualmap-fig13" else 70
        results[name] = figure.make([workload(each, count) for each in (*figure.needs, *figure.likes)], lambda _: None)
    return results


@pytest.mark.parametrize("name", SERVING)
def test_every_figure_is_made(made: dict[str, Result], name: str) -> None:
    result = made[name]
    assert result.claims
    for row in result.rows:
        assert all(row[column.key] is not None for column in result.columns)
    ElementTree.fromstring(svg(result.picture))


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
@pytest.mark.parametrize("name", SERVING)
def test_quotes_are_in_the_paper(made: dict[str, Result], name: str) -> None:
    text = plain((SHARED / "seeds" / "dualmap.txt").read_text())
    for claim in made[name].claims:
        assert plain(claim.said) in text, claim.said


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("’", "'"))


def test_a_goodput_is_where_attainment_falls_below_the_share() -> None:
    assert goodput([(4.0, 0.99), (6.0, 0.95), (8.0, 0.85), (10.0, 0.2)]) == pytest.approx(7.0)
    assert goodput([(4.0, 0.99), (6.0, 0.95)]) == 6.0, "as far as was run"
    assert goodput([(4.0, 0.5)]) == 0.0


def test_a_run_is_the_same_again_and_another_with_another_seed(small: None) -> None:
    load = load_of(workload("conversation"), "7B")
    first = ran(load, DualMapSystem(DECODING, "dualmap"), 8.0, lambda _: None)
    dualmap.runs._ran.cache_clear()
    assert ran(load, DualMapSystem(DECODING, "dualmap"), 8.0, lambda _: None) == first
    assert ran(load, DualMapSystem(DECODING, "dualmap", seed=1), 8.0, lambda _: None) != first
    assert first.samples
    assert all(len(loads) == 8 for _, loads in first.samples)
    assert not ran(load, DualMapSystem(PREFILL_ONLY, "dualmap"), 8.0, lambda _: None).samples


def test_prompts_are_cut_as_the_model_has_it() -> None:
    long = workload("conversation")
    rows = [row._replace(input_tokens=40 * 512, blocks=tuple(range(40))) for row in long.rows]
    long = Workload("conversation", rows, 512)
    assert {each.tokens for each in load_of(long, "14B", 10).arrivals} == {10_240}
    assert {len(each.blocks) for each in load_of(long, "14B", 10).arrivals} == {20}
    assert len(load_of(long, "7B", 10).arrivals) == 10
