"""Researchers' commands exist only where the laboratory is installed."""

from __future__ import annotations

import importlib.util
import re

import pytest

from pinyon.cli import main
from pinyon.cli.main import LAB_COMMANDS

OPERATORS = (
    "admin",
    "certs",
    "explain",
    "generate",
    "instances",
    "journal",
    "kv",
    "regions",
    "top",
    "topology",
    "transfer",
)


def commands(capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert main([]) == 2
    lines = [line[4:] for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    return {line.split()[0] for line in lines if line[:1].isalpha()}


def test_with_the_lab_there_are_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(capsys) == {*OPERATORS, *LAB_COMMANDS}


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a container image, which has neither the laboratory nor the launcher."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("pinyon_lab", "launch") else find(name)
    )


def test_without_the_lab_there_are_the_operators_ones(image: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(capsys) == {*OPERATORS}


def test_help_names_nothing_that_is_not_there(image: None, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    whole = capsys.readouterr().err
    assert not re.findall(r"\b(simulate|replay|traces?)\b", whole)
    for command in ([], *([each] for each in OPERATORS), ["transfer", "serve"], ["transfer", "bench"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        told = capsys.readouterr().out
        assert "./dev" not in told, command
        assert not re.findall(rf"\b(?:pinyon|command) (?:{'|'.join(LAB_COMMANDS)})\b", told), command


def test_failure_names_nothing_that_is_not_there(image: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["instances", "--conductor", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "pinyon: no conductor answers at 127.0.0.1:1 (is it running?)\n"


@pytest.fixture
def without_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pinyon_lab" else find(name))


@pytest.mark.usefixtures("without_the_lab")
@pytest.mark.parametrize("words", [(name,) for name in LAB_COMMANDS] + [("simulate", "a.jsonl", "--instances", "8")])
def test_without_the_lab_its_commands_say_that_it_is_missing(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith(
        f"{words[0]} is a command of the laboratory, the package pinyon_lab, which is not installed here"
    )


@pytest.mark.usefixtures("without_the_lab")
def test_without_the_lab_an_unknown_command_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulated"])
    assert ended.value.code == 2
    assert "invalid choice: 'simulated'" in capsys.readouterr().err
