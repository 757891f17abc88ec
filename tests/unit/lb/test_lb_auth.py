"""API keys."""

from __future__ import annotations

import pytest

from pinyon.core.errors import InvalidArgument, Unauthenticated
from services.lb.auth import PUBLIC, ApiKeys, Client, load_api_keys


def test_without_keys_everyone_is_public():
    assert load_api_keys("").client("") == PUBLIC
    assert not load_api_keys("").required


@pytest.mark.parametrize("text", ["# ours\n\nsk-1 anna\nsk-2\tbert\n", '{"sk-1": "anna", "sk-2": "bert"}'])
def test_both_kinds_of_files(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    keys = load_api_keys(str(path))
    assert keys.client("Bearer sk-1") == Client("anna")
    assert keys.client("bearer  sk-2") == Client("bert")
    for wrong in ("", "sk-1", "Bearer", "Bearer sk-", "Basic sk-1", "Bearer " + "x" * 10_000):
        with pytest.raises(Unauthenticated):
            keys.client(wrong)


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "one\n", "a b c\n", "{", '{"a": 1}', '{"": "t"}', '{"a b": "t"}', "k t\nk u\n", '{"a": ""}'],
)
def test_wrong_files_are_refused_without_telling_a_key(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load_api_keys(str(path))
    assert caught.value.field == "api_keys_file"


def test_a_missing_file():
    with pytest.raises(InvalidArgument, match="cannot read"):
        load_api_keys("/nowhere/keys")


def test_keys_are_not_kept():
    assert "sk-secret" not in repr(vars(ApiKeys({"sk-secret": Client("t")})))
