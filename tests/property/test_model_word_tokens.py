"""Tokens by the memory of words and runs equal those of the library, which gets the whole text at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from sys import getsizeof

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pinyon.model import word_tokens
from pinyon.model.merges import WORD_BYTES, merges_of
from pinyon.model.tokenizer import HfTokenizer, _byte_letters
from pinyon.model.word_tokens import RUN_CHARS, RUN_CHARS_MAX, Memory, MuchNew, WordTokens, known_words

PATTERNS = {
    "gpt2": "",
    "llama3": word_tokens._LLAMA3,
    "qwen": word_tokens._QWEN,
    "o200k": word_tokens._O200K,
    "tekken": word_tokens._TEKKEN,
}
MARKERS = ("<|end|>", "<|end|>>", "<|start|>", "</think>", "\u2581mark\u2581")
WORDS = [
    *("don't", "DON'T", "we'll", "x'S", "I'm", "HTTPServer", "snake_case", "the", "of", "a", "1234567", "3.14", "()"),
    *("\u00e9t\u00e9", "e\u0301", "\u0301", "na\u00efve", "\u4f60\u597d", "\U0001f642", "\u017f", "'\u017f", "\u212a"),
    *("\u00a0", "\u2028", "\u0664", "\x85", "\x00", "\x7f", "\x1c", "\x1f", "!?", "//", "\n/", "/\n"),
    *(" ", "  ", "   ", "\n", "\r\n", "\n\n ", "\t", "\x0b", "\x0c"),
    *MARKERS, "<|", "<|en", "|>", "</", "\u2581",
]  # fmt: skip
ASCII = st.text(st.characters(max_codepoint=127), max_size=60)
SPACED = st.text("aB1 \n\r\t\x0b/.'", max_size=60)
"""Texts of the characters that decide where a text may be cut."""
TEXT = st.lists(
    st.one_of(
        st.sampled_from(WORDS), st.sampled_from(WORDS).map(lambda word: f" {word} "), ASCII, SPACED, st.text(max_size=8)
    ),
    max_size=40,
).map("".join)


def rules_of(pattern: str, normalizer: object, *, normalized: bool = False) -> str:
    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    split = pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None
    tokenizer.pre_tokenizer = bytes_ if split is None else pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS * 3), "the cat of the house don't we'll\n\n  123 12"], trainer)
    tokenizer.normalizer = normalizer  # after training, so that the vocabulary has the characters that it changes
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=normalized) for marker in MARKERS[:3]])
    tokenizer.add_tokens([AddedToken(marker, normalized=normalized) for marker in MARKERS[3:]])
    begin = tokenizer.token_to_id("<|start|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", begin)]
    )
    text: str = tokenizer.to_str()
    return text


@cache
def tokenizers_of(name: str, nfc: bool) -> tuple[HfTokenizer, Tokenizer]:
    """Returns our tokenizer, which keeps its memory between examples, and the library's."""
    rules = rules_of(PATTERNS[name], normalizers.NFC() if nfc else None, normalized=not nfc and name == "llama3")
    ours = HfTokenizer(rules)
    assert ours.remembers
    return ours, Tokenizer.from_str(rules)


def library(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=60)
@given(text=TEXT, before=TEXT, again=st.integers(1, 60), added=st.booleans())
def test_tokens_are_those_of_the_whole_text(
    name: str, nfc: bool, text: str, before: str, again: int, added: bool
) -> None:
    ours, theirs = tokenizers_of(name, nfc)
    for each in (before + text, text, text * again, before + " " + text * again):
        expected = library(theirs, each, add_special_tokens=added)
        assert ours.encode(each, add_special_tokens=added).tolist() == expected


@pytest.mark.parametrize("name", PATTERNS)
def test_words_in_ascii_are_cut_as_the_library_cuts_them(name: str) -> None:
    """Every pair of ASCII characters between letters, digits and spaces: no class of the two libraries differs."""
    ours, theirs = tokenizers_of(name, False)
    for first in range(128):
        text = "".join(f"{chr(first)}{chr(second)} a{chr(first)}{chr(second)}1" for second in range(128))
        assert ours.encode(text).tolist() == library(theirs, text)


def test_what_is_new_is_bounded_and_known_afterwards() -> None:
    ours = HfTokenizer(rules_of(word_tokens._LLAMA3, None))
    text = " ".join(f"{number * 7919:x}" for number in range(4000))
    with pytest.raises(MuchNew):
        ours.encode(text, new_chars=RUN_CHARS)
    assert len(ours.encode(text)) > 4000
    assert ours.encode(text, new_chars=0).tolist() == ours.encode(text).tolist(), "it takes no time any more"
    blob = "x" * (RUN_CHARS_MAX + 1)
    for _ in range(2):  # the text cannot be cut anywhere, so it is never kept
        with pytest.raises(MuchNew):
            ours.encode(blob, new_chars=RUN_CHARS_MAX)
        assert len(ours.encode(blob, new_chars=RUN_CHARS_MAX + 1)) > 0


def test_a_tokenizer_without_words_is_new_all_the_time() -> None:
    rules = json.loads(rules_of(word_tokens._LLAMA3, None))
    rules["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    ours = HfTokenizer(json.dumps(rules))
    assert not ours.remembers
    with pytest.raises(MuchNew):
        ours.encode("four", new_chars=3)
    assert ours.encode("four", new_chars=4).tolist() == ours.encode("four").tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"model": {"type": "Unigram"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"post_processor": {"type": "BertProcessing"}},
        *({"added_tokens": [{"content": "<x>", flag: True}]} for flag in ("lstrip", "rstrip", "single_word")),
        {"added_tokens": [{"content": "<x>", "normalized": True}, {"content": "<y>", "normalized": False}]},
        {"added_tokens": [{"content": "<x>", "normalized": True}], "normalizer": {"type": "NFC"}},
    ],
    ids=json.dumps,
)
def test_a_tokenizer_that_needs_more_than_words_uses_the_library(change: dict[str, object]) -> None:
    rules = json.loads(rules_of(word_tokens._LLAMA3, None))
    assert known_words(rules)
    assert not known_words(rules | change)


def test_other_patterns_are_left_to_the_library() -> None:
    for change in (
        {"behavior": "Removed"},
        {"invert": True},
        {"pattern": {"String": " "}},
        {"pattern": {"Regex": r"\w+"}},
    ):
        rules = json.loads(rules_of(word_tokens._LLAMA3, None))
        rules["pre_tokenizer"]["pretokenizers"][0] |= change
        assert not known_words(rules)


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.binary(max_size=4)), max_size=80))
def test_the_memory_holds_the_latest_within_twice_its_limit(entries: list[tuple[str, bytes]]) -> None:
    limit = 10 * (word_tokens.ENTRY_BYTES + 7)
    memory, latest = Memory(limit), dict[str, bytes]()
    for text, tokens in entries:
        memory.put(text, tokens)
        latest.pop(text, None)
        latest[text] = tokens
        recent = list(latest.items())[-5:]
        assert [memory.get(each) for each, _ in recent] == [value for _, value in recent]
        assert len(memory) * word_tokens.ENTRY_BYTES <= 2 * limit


def test_what_is_put_again_takes_no_room_again() -> None:
    memory = Memory(20 * 250)
    for name in "abcdefgh":
        memory.put(name, b"1234")
    for _ in range(100):
        memory.put("again", b"1234")
    assert [memory.get(name) for name in "abcdefgh"] == [b"1234"] * 8


@pytest.mark.parametrize("char", ["a", "\u00e9", "\u4f60", "\U0001f642"])
def test_the_memory_counts_what_texts_take(char: str) -> None:
    limit = 1 << 20
    memory = Memory(limit)
    texts = [f"{number:06}" + char * 2000 for number in range(2000)]
    for text in texts:
        memory.put(text, b"1234")
    kept = [getsizeof(text) for text in texts if text in memory._young or text in memory._old]
    assert 0.8 * limit < sum(kept) <= 2 * limit


def by_qwens_words(markers: dict[str, bytes], whole: Callable[[str], bytes]) -> tuple[WordTokens, list[str]]:
    """Returns an encoder without a memory yet, and the texts that it will cut into words."""
    merges = merges_of(json.loads(rules_of(word_tokens._QWEN, None)), _byte_letters())
    assert merges is not None
    tokens, cut = WordTokens(word_tokens._QWEN, markers, merges, whole), list[str]()
    find = tokens._find

    def count(text: str) -> list[str]:
        cut.append(text)
        return find(text)  # type: ignore[no-any-return]

    tokens._find = count  # type: ignore[assignment]
    return tokens, cut


def test_what_stands_often_in_a_run_is_cut_once() -> None:
    tokens, cut = by_qwens_words({}, lambda text: b"whole")
    often, longer = " ".join(["q"] * 100), " ".join(["some-piece-of-many-tokens"] * 10)
    assert len(tokens.encode(often)) >= 400
    assert cut == ["q", " q"]
    tokens.encode(longer)
    assert cut[2:] == ["some-piece-of-many-tokens", " some-piece-of-many-tokens"]


@pytest.mark.parametrize("size", [3, 30, 300, 2000])
def test_work_is_bounded_however_long_words_are(size: int) -> None:
    tokens, cut = by_qwens_words({}, lambda text: b"1234")
    letters = "".join(random.Random(size).choices("abcdefghijklmnopqrstuvwxyz", k=64_000))
    text = " ".join(letters[at : at + size] for at in range(0, len(letters), size))
    new_chars = 8 * RUN_CHARS
    with pytest.raises(MuchNew):
        tokens.encode(text, new_chars)
    assert sum(map(len, cut)) <= new_chars + RUN_CHARS + size + 1, "one run more"


def test_markers_count_and_places_where_they_might_begin() -> None:
    tokens, _ = by_qwens_words({f"<S{number}>": b"1234" for number in range(1000)}, lambda text: b"whole")
    page = "<a> b </a>\n" * 300
    assert tokens.encode(page) == tokens.encode(page, 4096), "which is known"
    for text, beyond in (("<S" * 20_000, 4096), ("<S7>" * 2000, 4096), ("<S12> known " * 1100, 4096)):
        tokens.encode(text)
        with pytest.raises(MuchNew):
            tokens.encode(text, beyond)
        assert tokens.encode(text[:120], beyond) == tokens.encode(text[:120])


def test_only_long_words_are_left_to_the_library() -> None:
    tokens, _ = by_qwens_words({}, lambda text: b"%04d" % len(text))
    word = "x" * (WORD_BYTES + 1)
    assert tokens.encode(f"{word}/{word}") == b"%04d" % len(word) + b"%04d" % (len(word) + 1)
    assert tokens.encode(word[1:]) != b"%04d" % WORD_BYTES


def test_encoding_time_does_not_reveal_what_others_have_asked() -> None:
    ours = HfTokenizer(rules_of(word_tokens._LLAMA3, None))
    text = " ".join(f"{number * 7919:x}" for number in range(1500))
    expected = ours.encode(text, whose="a").tolist()
    assert ours.encode(text, new_chars=0, whose="a").tolist() == expected
    for other in ("", "b", "aa"):
        with pytest.raises(MuchNew):
            ours.encode(text, new_chars=0, whose=other)
        assert ours.encode(text, whose=other).tolist() == expected
