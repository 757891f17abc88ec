"""Researchers' commands are there where the laboratory is installed, and only there."""

from __future__ import annotations

import importlib.util

import pytest

from pinyon.cli import main
from pinyon.cli.main import LAB_COMMANDS

OPERATORS = ("admin", "certs", "explain", "generate", "instances", "journal", "regions", "top", "topology", "transfer")


def commands(capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert main([]) == 2
    lines = [line[4:] for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    return {line.split()[0] for line in lines if line[:1].isalpha()}


def test_with_the_lab_there_are_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(capsys) == {*OPERATORS, *LAB_COMMANDS}


@pytest.fixture
def without_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pinyon_lab" else find(name))


@pytest.mark.usefixtures("without_the_lab")
def test_without_the_lab_there_are_the_operators_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(capsys) == {*OPERATORS}


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
