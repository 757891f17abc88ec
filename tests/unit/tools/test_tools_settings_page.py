"""The page of settings says what the settings are."""

import subprocess
import sys

import pytest

from tools.settings_page import PAGE, tables, with_tables


def test_tables_are_those_of_the_settings():
    # in a process of its own, where no laboratory has added policies
    command = [sys.executable, "-m", "tools.settings_page", "--check"]
    assert subprocess.run(command, timeout=300, check=False).returncode == 0, (
        "python -m tools.settings_page writes them"
    )


def test_the_page_has_every_table():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- settings: {name} -->" in text for name in tables())


def test_a_table_of_no_service_is_refused():
    with pytest.raises(KeyError, match="nobody"):
        with_tables("<!-- settings: nobody -->\n<!-- end -->")
