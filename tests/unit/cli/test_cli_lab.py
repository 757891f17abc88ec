"""Researchers' commands are there where the laboratory is installed, and only there."""

from __future__ import annotations

import importlib.util

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


def test_without_the_lab_there_are_the_operators_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pinyon_lab" else find(name))
    assert commands(capsys) == {*OPERATORS}
