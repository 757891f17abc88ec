"""Researchers' commands are there where the laboratory is installed, and only there."""

from __future__ import annotations

import importlib.util
import re

import pytest

from pinyon.cli import main

LAB = ("compare", "plan", "replay", "reproduce", "simulate", "simulate-cache", "trace")
OPERATORS = ("admin", "certs", "explain", "generate", "instances", "journal", "regions", "top", "topology", "transfer")


def commands(capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert main([]) == 2
    lines = [line[4:] for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    return {line.split()[0] for line in lines if line[:1].isalpha()}


def test_with_the_lab_there_are_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(capsys) == {*OPERATORS, *LAB}


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a container image has: neither the laboratory nor what starts suites."""
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
        assert not re.findall(rf"\b(?:pinyon|command) (?:{'|'.join(LAB)})\b", told), command


def test_failure_names_nothing_that_is_not_there(image: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["instances", "--conductor", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "pinyon: no conductor answers at 127.0.0.1:1 (is it running?)\n"
