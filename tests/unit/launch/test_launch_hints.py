"""The lines that ``up`` prints, as a shell understands them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launch.hints import hints

SHOW_ARGUMENTS = """curl() { for each in "$@"; do printf '%s\\0' "$each"; done; }; grpcurl() { curl "$@"; };"""


def arguments(line: str) -> list[str]:
    """Returns the arguments that the command of a line gets."""
    shown = subprocess.run(["sh", "-c", SHOW_ARGUMENTS + line], capture_output=True, cwd="/", timeout=60, check=True)
    return shown.stdout.decode().split("\0")[:-1]


def test_plain_lines_name_the_addresses_and_the_model():
    lines = hints("http://127.0.0.1:8000", "127.0.0.1:7000", 'it\'s a "name"')
    curl, explain, instances, top, listing, schedule = lines
    words = arguments(curl)
    assert words[:2] == ["-N", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s a "name"'
    assert not any("Authorization" in word for word in words)
    assert f"x-request-id: {explain.split()[2]}" in words
    assert explain.endswith("explain first --conductor 127.0.0.1:7000")
    assert instances.endswith("instances --conductor 127.0.0.1:7000")
    assert top.endswith("top --conductor 127.0.0.1:7000 --lb http://127.0.0.1:8000")
    assert arguments(listing) == ["-plaintext", "127.0.0.1:7000", "list"]
    assert json.loads(arguments(schedule)[2])["model"] == 'it\'s a "name"'


@pytest.mark.parametrize(
    "text",
    [
        "sk-first acme\nsk-second acme\n",
        "# keys\n\n  # more\n  sk-first acme rpm=5\n",
        '{"sk-first": "acme", "b": "c"}',
    ],
    ids=["lines", "comments", "json"],
)
def test_with_api_keys_curl_sends_the_first_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "the keys"
    file.write_text(text)
    (line, *_) = hints("http://h:1", "h:2", "m", api_keys_file=str(file))
    assert "Authorization: Bearer sk-first" in arguments(line)
    assert "sk-first" not in line
    assert "!" not in line, "history expansion of a shell that people type into"


def test_a_keys_file_may_be_named_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("sk-first acme\n")
    monkeypatch.chdir(tmp_path)
    assert "Authorization: Bearer sk-first" in arguments(hints("http://h:1", "h:2", "m", api_keys_file="keys")[0])


def test_with_tls_every_line_names_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = hints(
        "https://h:1", "h:2", "m", authority=Path("tls/ca/ca.crt"), admin=Path("tls/admin/admin"), controller="h:3"
    )
    curl, explain, instances, regions, top, listing, called = lines
    assert arguments(curl)[1:3] == ["--cacert", str(tmp_path / "tls/ca/ca.crt")]
    for line in (explain, instances, regions, top):
        assert line.endswith(f" --tls-dir {tmp_path / 'tls/admin/admin'}")
    for line in (listing, called):
        words = arguments(line)
        assert words[words.index("-key") + 1] == str(tmp_path / "tls/admin/admin/tls.key")
        assert words[words.index("-authority") + 1] == "conductor.pinyon"
    assert arguments(called)[-1].endswith("/ListInstances")
