"""The findings of the prose check, and what it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.plain_english import CHECKED, files, findings, fragment, main, third_person

FRAGMENTS = (
    *("What is gone.", "Of a plain one.", "The same, which are not none.", "One that waits.", "It has left.", "All."),
    *("``own``: the last tokens.", "0: never.", "Whether it waits.", "These are kept.", "The others."),
)
PHRASES = (
    *("A block's key.", "The newest leaf.", "One place where prose is wrong.", "All requests of a step.", "Seconds."),
    *("``name`` as a person wrote it.", "Every node that holds a copy.", "Requests wait here."),
)


@pytest.mark.parametrize("text", FRAGMENTS)
def test_a_fragment_is_found(text: str) -> None:
    assert fragment(text, of_function=False) is not None
    assert fragment(text, of_function=True) is not None


@pytest.mark.parametrize("text", PHRASES)
def test_a_noun_phrase_describes_a_value_and_no_function(text: str) -> None:
    assert fragment(text, of_function=False) is None
    assert fragment(text, of_function=True) is not None


@pytest.mark.parametrize("text", ["Returns the leaf.", "Raises :class:`ValueError`.", "Has no effect.", "Tries again."])
def test_a_function_begins_with_what_it_does(text: str) -> None:
    assert fragment(text, of_function=True) is None


@pytest.mark.parametrize(
    ("verb", "form"), [("try", "tries"), ("push", "pushes"), ("have", "has"), ("play", "plays"), ("go", "goes")]
)
def test_the_third_person(verb: str, form: str) -> None:
    assert third_person(verb) == form


def found(path: Path) -> list[tuple[int, str]]:
    return [(each.line, each.what) for each in findings(path)]


def test_places_in_a_module(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    name = "test_" + "x" * 56
    long = " ".join(["word"] * 31)
    path.write_text(
        f'"""Of a module."""\nX = 1\n"""Of X."""\n\n\nclass A:\n    """A {long}."""\n\n    @property\n'
        f'    def b(self):\n        """A value."""\n\n    def c(self):\n        """A value."""\n\n\n'
        f'def {name}():\n    """A test."""\n'
    )
    assert found(path) == [
        (1, "a fragment: it begins with 'Of a'"),
        (3, "a fragment: it begins with 'Of X.'"),
        (7, "32 words: A word word word word word ..."),
        (14, "a function's docstring begins with a verb, not 'A'"),
        (17, "a test's name of 61 characters"),
    ]


def test_sentences_of_a_page(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    long = " ".join(["word"] * 29)
    path.write_text(f"# Title\n\n```sh\n{long} {long}\n```\n\nIt is {long}.\n- It {long}.\n- A {long}. And `a b`.\n")
    assert found(path) == [(7, "31 words: It is word word word word ...")]


def test_the_tools_themselves_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert all([*files([name])] for name in CHECKED)
    assert main(["tools"]) == 0
    assert capsys.readouterr().out == "0 places where the prose is not plain\n"


def test_a_docstring_ends_on_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""The first line.\n\nThe last one.\n"""\n')
    assert [str(each.what) for each in findings(file)] == ["the closing quotes have a line of their own"]
    file.write_text('"""The first line.\n\nThe last one."""\n')
    assert not list(findings(file))
