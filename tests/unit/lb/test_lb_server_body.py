"""The bodies that servers of instances get, and their answers without what no client may see."""

from __future__ import annotations

import json

import pytest

from pinyon.core.errors import Internal
from pinyon.frontdoor.servers.body import clean_answer, with_additions, without


@pytest.mark.parametrize("body", [b'{"a": 1}', b' \n{ "a" :[1.50,2e3] , "b":"\\u00e9"} ', bytearray(b'{"a":{}}')])
def test_additions_come_first_and_the_rest_stays(body: bytes) -> None:
    made = bytes(with_additions(body, "plan", "salt"))
    added = b'"kv_transfer_params":{"pinyon":"plan"},"cache_salt":"salt",'
    assert made.replace(added, b"", 1) == body
    assert json.loads(made) == {"kv_transfer_params": {"pinyon": "plan"}, "cache_salt": "salt", **json.loads(body)}


def test_an_empty_object_gets_no_comma() -> None:
    assert json.loads(bytes(with_additions(b"{ \n }", "", "salt"))) == {"cache_salt": "salt"}
    assert with_additions(b"{}", "", "") == b"{}"


def test_members_are_removed_however_they_are_written() -> None:
    body = b'{"x": 1, "kv\\u005ftransfer_params": 2, "kv_transfer_params": 3}'
    assert json.loads(without(body, frozenset(("kv_transfer_params",)))) == {"x": 1}


@pytest.mark.parametrize(
    "answer",
    [b'{"kv_transfer_params":null,"a":1}', b'{"text":"\\"kv_transfer_params\\": {}"}', b'{"a":"kv_transfer_params"}'],
)
def test_an_answer_without_parameters_stays_as_it_is(answer: bytes) -> None:
    assert clean_answer(answer) is answer


def test_parameters_become_null_wherever_they_are() -> None:
    answer = 'data: {"é":1,"kv_transfer_params" : {"pinyon":{"b":"}\\"}"}}}\n\ndata: {"kv_transfer_params":{}}\n\n'
    clean = 'data: {"é":1,"kv_transfer_params" : null}\n\ndata: {"kv_transfer_params":null}\n\n'
    assert clean_answer(answer.encode()) == clean.encode()
    assert clean_answer(b'{"kv_transfer_params":') == b'{"kv_transfer_params":'
    with pytest.raises(Internal):
        clean_answer(b'{"kv_transfer_params":{"pinyon":')


def test_very_many_parameters_become_null() -> None:
    event = b'data: {"n":%d,"kv_transfer_params":%b,"text":"\xc3\xa9"}\n\n'
    told = b"".join(event % (n, (b'{"a":{"kv_transfer_params":{}}}', b"null", b"{}")[n % 3]) for n in range(9000))
    assert clean_answer(told) == b"".join(event % (n, b"null") for n in range(9000))
