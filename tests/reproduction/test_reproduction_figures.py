"""Every figure in small: it is made, all its values are there, it is drawn, and what it quotes is in the paper."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from pinyon_lab.papers import Basis
from pinyon_lab.pictures import svg
from tests.reproduction.small import EVERY, SHARED, made, plain, text_of


@pytest.mark.parametrize("name", EVERY)
def test_every_figure_is_made(name: str) -> None:
    result = made(name.partition("-")[0])[name]
    assert result.claims
    assert result.rows or name == "feather-fig5.12", "which has too few requests to be sampled"
    for row in result.rows:
        for column in result.columns:
            value = row[column.key]
            assert value is not None
            assert not isinstance(value, float) or math.isfinite(value), (column.key, row)
    ElementTree.fromstring(svg(result.picture))


@pytest.mark.parametrize("name", [name for name in EVERY if name.startswith("mooncake-")])
def test_mooncakes_systems_are_modelled_and_say_so(name: str) -> None:
    result = made("mooncake")[name]
    assert {claim.basis for claim in result.claims} <= {Basis.MODELLED, Basis.CONSTRUCTION}
    if name not in ("mooncake-eq2", "mooncake-fig14"):
        assert any("Modelled: LLaMA3-70B" in note for note in result.notes)


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
@pytest.mark.parametrize("name", EVERY)
def test_quotes_are_in_the_paper(name: str) -> None:
    paper = name.partition("-")[0]
    for claim in made(paper)[name].claims:
        assert plain(claim.said) in text_of(paper), claim.said
