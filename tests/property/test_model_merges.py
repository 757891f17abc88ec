"""Words are merged as the library merges them."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pinyon.model.merges import WORD_BYTES, Merges, merges_of
from pinyon.model.tokenizer import _byte_letters

TEXT = "the cat of the house abab ababab aaaa aaaaaaaa don't snake_case 1234567 () ){} the then there other others " * 3
WORDS = st.text("abcdehnort _'(){}19\n\x00\x7f", min_size=1, max_size=WORD_BYTES)


@cache
def rules(ignore_merges: bool, listed: bool) -> str:
    """Returns a small vocabulary's rules, with pairs of one letter, and words that no pairs lead to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    found = json.loads(tokenizer.to_str())
    model = found["model"]
    if not listed:
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    model["ignore_merges"] = ignore_merges
    model["vocab"] |= {word: len(model["vocab"]) + number for number, word in enumerate(("catt", "aab", "abcde"))}
    return json.dumps(found)


@cache
def both(ignore_merges: bool, listed: bool) -> tuple[Merges, Tokenizer]:
    text = rules(ignore_merges, listed)
    merges = merges_of(json.loads(text), _byte_letters())
    assert merges is not None
    return merges, Tokenizer.from_str(text)


@given(WORDS | st.sampled_from(["catt", "aab", "abcde", "aaaaaaa", "abababa", "ababab"]), st.booleans(), st.booleans())
def test_words_are_those_of_the_library(word: str, ignore_merges: bool, listed: bool) -> None:
    merges, theirs = both(ignore_merges, listed)
    written = word.translate(_byte_letters())
    expected = b"".join(token.id.to_bytes(4, "little") for token in theirs.model.tokenize(written))
    assert merges.tokens(word.encode()) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.1},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"vocab": {}},
        {"merges": [["a", "zz"]]},
        {"merges": ["a b c"]},
    ],
    ids=json.dumps,
)
def test_other_models_are_left_to_the_library(change: dict[str, object]) -> None:
    found = json.loads(rules(False, True))
    found["model"] |= change
    assert merges_of(found, _byte_letters()) is None
