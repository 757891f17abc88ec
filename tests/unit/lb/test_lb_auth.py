from __future__ import annotations

import pytest

from pinyon.core.errors import InvalidArgument, Unauthenticated
from pinyon.frontdoor.auth import PUBLIC, ApiKeys, Client, load_api_keys


def test_without_keys_everyone_is_public():
    assert load_api_keys("").client("") == PUBLIC


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


@pytest.mark.parametrize(
    "text",
    [
        "sk-1 anna rpm=60 tpm=1000\nsk-2 bert rpm=0\nsk-3 anna priority=2\n",
        '{"sk-1": {"tenant": "anna", "rpm": 60, "tpm": 1000}, "sk-2": {"tenant": "bert", "rpm": 0}, '
        '"sk-3": {"tenant": "anna", "priority": 2}}',
    ],
)
def test_limits_are_the_tenant_s_whichever_entry_names_them(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    keys = load_api_keys(str(path))
    limits = {name: (client.rpm, client.tpm) for name in "123" for client in [keys.client(f"Bearer sk-{name}")]}
    assert limits == {"1": (60, 1000), "2": (0, None), "3": (60, 1000)}
    assert keys.client("Bearer sk-3").priority == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sk-1 anna rpm=60\nsk-2 anna rpm=61\n", "two values of rpm"),
        ("sk-1 anna rpm=-1\n", "rpm must be a whole number"),
        ("sk-1 anna tpm=many\n", "tpm must be a whole number"),
        ('{"sk-1": {"tenant": "a", "tpm": 1.5}}', "tpm must be a whole number"),
        ('{"sk-1": {"tenant": "a", "rpm": true}}', "rpm must be a whole number"),
        ('{"sk-1": {"tenant": "a", "tpm": 9999999999999999}}', "tpm must be a whole number"),
    ],
)
def test_limits_that_make_no_sense_are_refused(tmp_path, text, complaint):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=complaint):
        load_api_keys(str(path))
