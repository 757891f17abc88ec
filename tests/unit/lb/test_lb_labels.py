"""The kind and the owner of a request, by its labels."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import RequestClass
from pinyon.frontdoor.auth import PUBLIC, Client
from pinyon.frontdoor.head import Head, Labels, classify, read_head
from pinyon.openai.parse import Call, parse_chat, parse_completion

KEY = Client("anna", "file", 5, ("eu-west", "eu-north"))
COMPLETION = Call("m", "text", "prompt")


def chat(*roles: str, **fields: object) -> Call:
    messages = [{"role": role, "content": "x"} for role in roles]
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def labels(**headers: str | bytes) -> Labels:
    """Returns the labels of headers by name, with ``_`` for ``-``; text goes as UTF-8."""
    raw = [
        (name.replace("_", "-").encode(), value.encode() if isinstance(value, str) else value)
        for name, value in headers.items()
    ]
    head = Head("/")
    read_head(head, raw)
    return head.labels


def test_what_nobody_says():
    assert classify(Labels(), COMPLETION, PUBLIC, 7.5) == RequestClass(
        kind="completion", arrived_unix_s=7.5, tenant="public"
    )
    assert classify(Labels(), chat("user"), PUBLIC, 7.5).kind == "chat"


@pytest.mark.parametrize(("roles", "turn"), [("u", 1), ("su", 1), ("suau", 2), ("uauau", 3), ("s", 1), ("uu", 2)])
def test_a_turn_is_what_the_user_has_said_so_far(roles, turn):
    names = {"u": "user", "a": "assistant", "s": "system"}
    assert classify(Labels(), chat(*(names[role] for role in roles)), PUBLIC, 0.0).turn == turn


def test_headers_go_before_the_body_and_the_body_before_the_key():
    said = labels(
        x_pinyon_type="search", x_pinyon_session="s-1", x_pinyon_user="bert", x_pinyon_priority="-7",
        x_pinyon_geographies="eu-north",
    )  # fmt: skip
    call = chat("user", user="carl", priority=9)
    assert classify(said, call, KEY, 1.0) == RequestClass("search", 1, "s-1", "bert", -7, 1.0, "anna", ("eu-north",))
    assert classify(Labels(), call, KEY, 1.0) == RequestClass(
        "file", 1, "", "carl", 9, 1.0, "anna", ("eu-west", "eu-north")
    )
    assert classify(Labels(), chat("user"), KEY, 1.0).priority == 5
    assert classify(labels(x_pinyon_priority="0"), chat("user"), KEY, 1.0).priority == 0, "0 is said, too"


def test_the_user_is_openais():
    assert chat("user", user="u", safety_identifier="s").user == "u"
    assert chat("user", user="", safety_identifier="s").user == "s"
    assert parse_completion(b'{"model":"m","prompt":"a","user":"u","priority":3}').user == "u"


@pytest.mark.parametrize("order", [1, -1])
def test_our_session_header_goes_first(order):
    both = [("x_session_id", "theirs"), ("x_pinyon_session", "ours")][::order]
    assert labels(**dict(both)).session == "ours"
    theirs = labels(x_session_id="theirs").session
    assert theirs
    empty = [("x_session_id", "theirs"), ("x_pinyon_session", "")][::order]
    assert labels(**dict(empty)).session == theirs, "empty is not said"


def test_session_ids_are_told_apart_and_never_passed_on_in_clear():
    names = {text: labels(x_session_id=text).session for text in ("theirs", "Bearer s3cret", "theirs-2")}
    assert len(set(names.values())) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names.values())
    assert labels(x_session_id="theirs").session == names["theirs"]


@pytest.mark.parametrize("text", ["", "x" * 257, "x" * 5000, "\x1b[31m", "a\tb"])
def test_others_session_ids_that_do_not_fit_are_ignored(text):
    assert labels(x_session_id=text, x_pinyon_user="u") == Labels(user="u")
    assert labels(x_session_id=text, x_pinyon_session="ours").session == "ours"


@pytest.mark.parametrize("name", ["type", "session", "user", "geographies"])
def test_an_empty_header_says_nothing(name):
    assert labels(**{f"x_pinyon_{name}": " "}) == Labels()


@pytest.mark.parametrize(
    ("sent", "read"), [("Łukasz".encode(), "Łukasz"), ("José".encode(), "José"), ("José".encode("latin-1"), "José")]
)
def test_headers_are_utf8_or_else_latin_1(sent, read):
    said = labels(x_pinyon_user=sent, x_pinyon_session=sent)
    assert (said.user, said.session) == (read, read)


@pytest.mark.parametrize("text", ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "a\u00a0b", "x" * 256])
def test_whatever_can_be_written_is_a_name(text):
    assert chat("user", user=text).user == text
    assert labels(x_pinyon_user=text).user == text
    assert RequestClass(user=text, session=text).user == text


def test_a_header_never_widens_where_the_key_allows():
    with pytest.raises(InvalidArgument, match="us-east") as caught:
        classify(Labels(geographies=("eu-west", "us-east")), COMPLETION, KEY, 0.0, "x-pinyon-geographies")
    assert caught.value.field == "x-pinyon-geographies"
    anywhere = replace(KEY, geographies=())
    assert classify(Labels(geographies=("us-east",)), COMPLETION, anywhere, 0.0).geographies == ("us-east",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-pinyon-type", "x" * 33),
        ("x-pinyon-type", "a b"),
        ("x-pinyon-type", "grün"),
        ("x-pinyon-type", "-chat"),
        ("x-pinyon-session", "x" * 257),
        ("x-pinyon-session", "a\x00b"),
        ("x-pinyon-session", "\x1b[31m"),
        ("x-pinyon-user", "a\nb"),
        ("x-pinyon-user", "x" * 257),
        ("x-pinyon-priority", "1001"),
        ("x-pinyon-priority", "-1001"),
        ("x-pinyon-priority", "high"),
        ("x-pinyon-priority", "1" * 5000),
        ("x-pinyon-priority", "1.0"),
        ("x-pinyon-geographies", ","),
        ("x-pinyon-geographies", "eu-west,"),
        ("x-pinyon-geographies", ",".join(["eu"] * 17)),
        ("x-pinyon-geographies", "x" * 65),
    ],
)
def test_a_strangers_header_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgument) as caught:
        labels(**{name.replace("-", "_"): value})
    assert caught.value.field == name
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("user", "x" * 257), ("user", "a\nb"), ("user", "a\x85b"), ("user", 7), ("safety_identifier", "x" * 257),
     ("priority", 1001), ("priority", True), ("priority", "1")],
)  # fmt: skip
def test_a_strangers_field_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgument) as caught:
        chat("user", **{field: value})
    assert caught.value.field == field
