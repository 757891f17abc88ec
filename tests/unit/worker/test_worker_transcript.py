"""Tokens to text, and the end of requests. The expected text is that of all tokens at once."""

from __future__ import annotations

import pytest

from pinyon.core.request import FinishReason, SamplingParams
from pinyon.model import ByteTokenizer, load_card
from services.worker.decode.transcript import Transcript


def run(text: str, tokens: list[int] | None = None, **sampling):
    transcript = Transcript(load_card(), SamplingParams(**sampling))
    out = ""
    for token in tokens if tokens is not None else text.encode():
        out += transcript.push(token)
        if transcript.finish is not None:
            break
    return out, transcript.count, transcript.finish


def test_length():
    assert run("hello world", max_tokens=5) == ("hello", 5, FinishReason.LENGTH)


def test_an_unfinished_character_shows_at_the_end():
    assert run("aé", max_tokens=2) == ("a\ufffd", 2, FinishReason.LENGTH)
    assert run("aé", max_tokens=3) == ("aé", 3, FinishReason.LENGTH)


def test_eos_counts_and_has_no_text():
    tokens = [*b"ab", ByteTokenizer.EOS, *b"cd"]
    assert run("", tokens, max_tokens=9) == ("ab", 3, FinishReason.STOP)
    assert run("", tokens, max_tokens=5, ignore_eos=True) == ("abcd", 5, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("lo",), ("hel", 5, FinishReason.STOP)),
        (("zz", "o w"), ("hell", 7, FinishReason.STOP)),
        (("world!",), ("hello world", 11, FinishReason.LENGTH)),  # held back, then emitted
    ],
)
def test_stop_strings(stop, expected):
    assert run("hello world", max_tokens=11, stop=stop) == expected


def test_a_stop_token_counts_and_has_no_text():
    assert run("hello", max_tokens=9, stop_token_ids=(0, ord("l"))) == ("he", 3, FinishReason.STOP)
    assert run("hello", max_tokens=3, stop_token_ids=(ord("l"),)) == ("he", 3, FinishReason.STOP)


def test_what_was_held_back_comes_with_a_stop_token():
    assert run("hello", max_tokens=9, stop=("ex",), stop_token_ids=(ord("l"),)) == ("he", 3, FinishReason.STOP)
    assert run("a\u00e9b", [*"aé".encode()[:2], *b"b"], max_tokens=9, stop_token_ids=(ord("b"),)) == (
        "a\ufffd",
        3,
        FinishReason.STOP,
    )


@pytest.mark.parametrize(
    ("min_tokens", "sampling", "expected"),
    [
        (3, {"stop_token_ids": (ord("l"),)}, ("hel", 4, FinishReason.STOP)),
        (2, {"stop_token_ids": (ord("l"),)}, ("he", 3, FinishReason.STOP)),
        (10, {"stop_token_ids": (ord("l"),)}, ("hello world", 11, FinishReason.LENGTH)),
        (4, {"stop": ("l",)}, ("hello wor", 10, FinishReason.STOP)),
        (3, {"stop": ("ll", "world")}, ("he", 4, FinishReason.STOP)),  # the stop string ends after the minimum
        (4, {"stop": ("ll", "world")}, ("hello ", 11, FinishReason.STOP)),
        (4, {"stop": ("l", "lox")}, ("hello wor", 10, FinishReason.STOP)),  # "l" is held back, and no longer counts
        (11, {"stop": ("world",)}, ("hello world", 11, FinishReason.LENGTH)),
    ],
)
def test_nothing_ends_a_text_before_min_tokens(min_tokens, sampling, expected):
    assert run("hello world", max_tokens=11, min_tokens=min_tokens, **sampling) == expected


def test_eos_before_min_tokens_is_no_end():
    tokens = [*b"ab", ByteTokenizer.EOS, *b"cd", ByteTokenizer.EOS]
    assert run("", tokens, max_tokens=9, min_tokens=3) == ("abcd", 6, FinishReason.STOP)


def test_a_stop_string_in_the_last_bytes_counts():
    assert run("ab\u00e9", max_tokens=3, stop=("b\ufffd",)) == ("a", 3, FinishReason.STOP)
