from __future__ import annotations

import pytest

from pinyon.cli.called import called_as


@pytest.fixture
def installed(tmp_path, monkeypatch):
    command = tmp_path / "bin" / "pinyon"
    command.parent.mkdir()
    command.touch(0o755)
    monkeypatch.setenv("PATH", str(command.parent))
    return command


@pytest.mark.parametrize(
    ("called", "named"),
    [
        (".venv/bin/pinyon", ".venv/bin/pinyon"),
        ("pinyon", "pinyon"),
        ("/x/pinyon/cli/__main__.py", "python -m pinyon.cli"),
        ("/x/pytest", "pinyon"),
    ],
)
def test_path_is_named_as_it_was_typed(installed, monkeypatch, called, named):
    monkeypatch.setattr("sys.argv", [called])
    assert called_as() == named


def test_command_that_the_shell_finds_needs_no_path(installed, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(installed)])
    assert called_as() == "pinyon"
