from __future__ import annotations

import pytest

from tools.request_page import PAGE, STAY, line_of, with_lines

ROOT = PAGE.parent.parent.parent


def test_names_and_lines_of_the_page_are_true() -> None:
    text = PAGE.read_text()
    assert with_lines(text) == text, "python -m tools.request_page writes them"


def test_the_page_is_short_enough_to_walk() -> None:
    way = PAGE.read_text().partition("## And back")[0]
    stays = [match.groups() for match in STAY.finditer(way) if "upstreams" not in match.group(2)]
    assert len(stays) <= 20
    assert len({file for _, file in stays if "frontdoor" in file or "openai" in file}) <= 12


def test_a_name_that_is_gone_is_told() -> None:
    with pytest.raises(LookupError, match=r"request_page.py does not define PAGE.x"):
        line_of(ROOT / "tools" / "request_page.py", "PAGE.x")
