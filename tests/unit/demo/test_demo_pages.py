"""The lines of README and the pages, for people to copy: each begins with something that is there, and parses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile

import pytest

from pinyon.cli.main import _parser
from services.__main__ import command_line
from services.process import ROOT

PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
ELSEWHERE = {"curl", "docker", "docker-compose", "export", "grpcurl"}
"""Of people's machines, not ours."""


def commands(page: str) -> Iterator[list[str]]:
    """The words of each line of the blocks that are for a shell, as far as its first pipe or the like; without
    variables that are set for it. What is quoted over several lines, or goes on behind a backslash, is one line."""
    for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        text = ""
        for line in block.replace("\\\n", " ").splitlines():
            text += line + "\n"
            try:
                words = shlex.split(text, comments=True)
            except ValueError:  # a quotation goes on
                continue
            text = ""
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
                words.pop(0)
            if words:
                yield list(takewhile(lambda word: word not in ("|", ">", "<", "&", "&&"), words))
        assert not text, f"{page}: a quotation without an end: {text}"


@pytest.mark.parametrize("page", PAGES)
def test_lines_to_copy_begin_with_what_is_there(page):
    for words in commands(page):
        assert words[0] in ELSEWHERE or (ROOT / words[0]).exists() or words[0].startswith(".venv/bin/"), words


@pytest.mark.parametrize("page", PAGES)
def test_lines_to_copy_have_options_that_exist(page):
    for words in commands(page):
        if words[:2] == ["./dev", "up"]:
            command_line().parse_args(words[1:])
        elif words[0] == ".venv/bin/pinyon":
            _parser().parse_args(words[1:])
