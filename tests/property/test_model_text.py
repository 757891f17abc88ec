"""Tokens and text: detokenizing and stop strings do not depend on how the stream is cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from pinyon.core.errors import InvalidArgument
from pinyon.model.card import load_card
from pinyon.model.detokenizer import IncrementalDetokenizer
from pinyon.model.stop import StopMatcher
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer
from pinyon.model.tokenizer import Tokenizer as TokenizerProtocol
from tests.long import usually

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def sentencepiece_like_json() -> str:
    """Returns a tokenizer in Llama 2's form: metaspace, byte fallback, the first space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "é", "▁a", "ab", "▁ab", "🙂"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[("▁", "a"), ("a", "b"), ("▁", "ab")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    text: str = tokenizer.to_str()
    return text


def metaspace(scheme: str) -> HfTokenizer:
    """Returns a newer SentencePiece form: the pre-tokenizer and the decoder with that scheme."""
    rules = json.loads(sentencepiece_like_json())
    rules["normalizer"] = None
    rules["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    rules["decoder"] = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, {**rules["pre_tokenizer"], "split": True}],
    }
    return HfTokenizer(json.dumps(rules), (2,))


BYTE_LEVEL = load_card(str(GOLDEN / "llama-f32")).tokenizer
TOKENIZERS: dict[str, TokenizerProtocol] = {
    "byte": ByteTokenizer(),
    "byte-level": BYTE_LEVEL,
    "sentencepiece-like": HfTokenizer(sentencepiece_like_json(), (2,)),
    "metaspace-first": metaspace("first"),
    "metaspace-always": metaspace("always"),
    "metaspace-never": metaspace("never"),
    "llama": load_card(str(GOLDEN.with_name("golden_text") / "llama-pieces-bos")).tokenizer,
    "qwen": load_card(str(GOLDEN.with_name("golden_text") / "qwen3-bytes")).tokenizer,
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def chunks_of(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    ends = sorted({c for c in cuts if c < len(tokens)} | {len(tokens)})
    return [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=usually(20, long=200))
@given(data=st.data(), cuts=st.lists(st.integers(0, 40), max_size=10), skip=st.booleans())
def test_deltas_add_up_to_the_decoded_whole(name: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(chunk) for chunk in chunks_of(tokens, cuts)) + detokenizer.flush()
    assert text == tokenizer.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT)
def test_valid_text_never_shows_half_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push([token]) for token in tokenizer.encode(text).tolist()]
    whole = "".join(deltas) + detokenizer.flush()
    # The others change white space (pieces) or the normal form (Qwen).
    assert whole == text or name not in ("byte", "byte-level")
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


class CountsDecoded(HfTokenizer):
    """The tokenizer ``sentencepiece-like`` with a token for U+FFFD, as vocabularies made from web pages have."""

    def __init__(self) -> None:
        rules = json.loads(sentencepiece_like_json())
        self.unknown = rules["model"]["vocab"]["\ufffd"] = len(rules["model"]["vocab"])
        super().__init__(json.dumps(rules), (2,))
        self.decoded = 0

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        tokens = list(tokens)
        self.decoded += len(tokens)
        return super().decode(tokens, skip_special_tokens=skip_special_tokens)


def test_an_unfinished_looking_character_holds_no_text_back() -> None:
    """Each token also decodes only a bounded part of the text."""
    tokenizer = CountsDecoded()
    for tokens in ([tokenizer.unknown] * 2000, [tokenizer.unknown, 3 + 0xE2] * 1000):
        detokenizer = IncrementalDetokenizer(tokenizer)
        tokenizer.decoded = 0
        text = "".join(detokenizer.push([token]) for token in tokens)
        assert len(text) > len(tokens) - 100
        assert tokenizer.decoded < 200 * len(tokens)
        assert text + detokenizer.flush() == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["byte", "byte-level"])
@given(text=TEXT | st.sampled_from(["<|im_end|>", "a<|bos|>b", "\r\n\t", "\0"]))
def test_encoding_goes_there_and_back(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode_plain(text) if isinstance(tokenizer, HfTokenizer) else tokenizer.encode(text)
    assert tokens.dtype == "<u4"
    assert TOKENIZERS[name].decode(tokens.tolist()) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_lone_surrogates_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        TOKENIZERS[name].encode("a\ud800b")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_outside_the_vocabulary_are_left_out(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = [*tokenizer.encode("ab").tolist(), tokenizer.vocab_size + 5]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(tokens) + detokenizer.flush() == tokenizer.decode(tokens) == "ab"


def brute_force(text: str, stops: list[str]) -> tuple[str, bool]:
    """Searches character by character: generation stops as soon as the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


ALPHABET = st.text("ab", max_size=30)


@settings(max_examples=usually(45, long=500))
@given(
    text=ALPHABET,
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_stop_strings_match_as_by_brute_force(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, stopped = brute_force(text, stops)
    matcher = StopMatcher(stops)
    ends = sorted({c for c in cuts if c < len(text)} | {len(text)})
    out, matched = "", False
    for a, b in zip([0, *ends], ends, strict=False):
        safe, matched = matcher.push(text[a:b])
        out += safe
        # Text that was released stays right; text held back could still begin a stop string.
        assert expected.startswith(out)
        if not matched:
            held = text[len(out) : b]
            assert not held or any(stop.startswith(held) for stop in stops)
    assert matched == stopped
    out += matcher.flush()
    assert out == expected


@settings(max_examples=usually(45, long=500))
@given(
    deltas=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    quiet=st.integers(0, 8),
)
def test_what_ends_in_the_quiet_beginning_does_not_match(deltas: list[str], stops: list[str], quiet: int) -> None:
    text, silent = "".join(deltas), len("".join(deltas[:quiet]))
    ends = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > silent
    ]
    matcher, out = StopMatcher(stops), ""
    for number, delta in enumerate(deltas):
        safe, matched = matcher.push(delta, ends=number >= quiet)
        out += safe
        if matched:
            break
    assert matcher.matched == bool(ends)
    assert out + matcher.flush() == (text[: min(ends)[1]] if ends else text)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("text EN") == ("text ", False)
    assert matcher.push("D more") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""
    assert matcher.matched


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_the_longest_stop_strings_cost_a_character_little() -> None:
    """Each token of a stream is compared with all of them, on the worker's event loop."""
    stops = [f"{first}{'a' * 254}b" for first in "bcdefghijklmnop"] + ["a" * 255 + "b"]
    matcher, calls = StopMatcher(stops), 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(300):
        matcher.push("a")
    sys.setprofile(count)
    try:
        text = "".join(matcher.push("a")[0] for _ in range(100))
    finally:
        sys.setprofile(None)
    assert text == "a" * 100
    assert calls < 100 * 10 * len(stops)
