from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument, Unauthenticated
from pinyon.frontdoor.auth import PUBLIC, ApiKeys, Client, load_api_keys

KEY = Client("anna", "file", 5, ("eu-west", "eu-north"))
ENTRY = {"tenant": "anna", "type": "file", "priority": 5, "geographies": ["eu-west", "eu-north"]}


def loaded(tmp_path: Path, text: str) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(text)
    return load_api_keys(str(path))


def test_without_keys_everyone_is_public():
    assert load_api_keys("").client("") == PUBLIC


@pytest.mark.parametrize("text", ["# ours\n\nsk-1 anna\nsk-2\tbert\n", '{"sk-1": "anna", "sk-2": "bert"}'])
def test_both_kinds_of_files(tmp_path, text):
    keys = loaded(tmp_path, text)
    assert keys.client("Bearer sk-1") == Client("anna")
    assert keys.client("bearer  sk-2") == Client("bert")
    for wrong in ("", "sk-1", "Bearer", "Bearer sk-", "Basic sk-1", "Bearer " + "x" * 10_000):
        with pytest.raises(Unauthenticated):
            keys.client(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "", "# nothing\n", "one\n", "a b c\n", "{", '{"a": 1}', '{"": "t"}', '{"a b": "t"}', "k t\nk u\n", '{"a": ""}',
        "k anna colour=red\n",
        "k anna type=a type=b\n",
        "k anna type=\n",
        "k anna priority=high\n",
        "k anna priority=1001\n",
        "k anna geographies=\n",
        "k anna geographies=eu,,us\n",
        "k anna\nk anna priority=1\n",
        *(
            json.dumps({"k": {**ENTRY, **change}})
            for change in (
                {"tenant": ""}, {"tenant": None}, {"type": 1}, {"type": ""}, {"priority": True}, {"priority": 1.0},
                {"geographies": "eu"}, {"geographies": [1]}, {"geographies": {"eu": 1}}, {"colour": "red"},
            )
        ),
        json.dumps({"k": {"type": "file"}}),
        '{"k": {"tenant": "a", "tenant": "b"}}',
    ],
)  # fmt: skip
def test_wrong_files_are_refused_without_telling_a_key(tmp_path, text):
    with pytest.raises(InvalidArgument) as caught:
        loaded(tmp_path, text)
    assert caught.value.field == "api_keys_file"
    assert "red" not in caught.value.message


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
    keys = loaded(tmp_path, text)
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
    with pytest.raises(InvalidArgument, match=complaint):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    "text", [json.dumps({"k": ENTRY}), "k anna type=file priority=5 geographies=eu-west,eu-north\n"]
)
def test_keys_say_what_their_requests_do_not(tmp_path, text):
    assert loaded(tmp_path, text).client("Bearer k") == KEY


@pytest.mark.parametrize(
    ("text", "warned"), [("k anna geographies=eu\nj bert geographies=us\n", 1), ("k anna type=file\n", 0)]
)
def test_geographies_that_nothing_places_by_are_warned_of_once(tmp_path, caplog, text, warned):
    with caplog.at_level(logging.WARNING, logger="pinyon"):
        loaded(tmp_path, text)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert all("that have a --region" in record.getMessage() for record in caplog.records)
