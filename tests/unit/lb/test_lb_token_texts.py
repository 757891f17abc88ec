"""Single tokens as texts and bytes, against the tokenizers that decode them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pinyon.model import ByteTokenizer, HfTokenizer, load_card
from pinyon.openai.token_texts import TokenTexts

GOLDEN = Path(__file__).parents[2] / "data" / "golden"

SENTENCEPIECE = """{
  "version": "1.0", "added_tokens": [
    {"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
     "normalized": false}],
  "normalizer": null, "pre_tokenizer": null, "post_processor": null, "truncation": null, "padding": null,
  "decoder": {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
  "model": {"type": "BPE", "byte_fallback": true, "vocab": {"<s>": 0, "▁jay": 1, "s": 2, "<0xE2>": 3}, "merges": []}
}"""


@pytest.mark.parametrize("text", ["The jay caches seeds.", "né — 松鼠 🐦", "  two  spaces\n"])
@pytest.mark.parametrize("name", ["byte", "qwen3-f32"])
def test_the_bytes_of_tokens_are_those_of_their_text(name, text):
    tokenizer = ByteTokenizer() if name == "byte" else load_card(str(GOLDEN / name)).tokenizer
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(text).tolist()
    assert bytes(byte for token in tokens for byte in texts.data(token)).decode() == text
    for token in tokens:
        assert texts.text(token) == bytes(texts.data(token)).decode("utf-8", "replace")


def test_special_tokens_and_unknown_ones_have_names():
    texts = TokenTexts(ByteTokenizer())
    assert (texts.text(257), texts.data(257)) == ("token_id:257", [])
    tokenizer = load_card(str(GOLDEN / "qwen3-f32")).tokenizer
    assert isinstance(tokenizer, HfTokenizer)
    texts = TokenTexts(tokenizer)
    assert (texts.text(3), texts.data(3)) == ("<|im_end|>", [])
    assert texts.text(tokenizer.vocab_size + 5) == f"token_id:{tokenizer.vocab_size + 5}"
    assert texts.pieces([3, tokenizer.vocab_size]) == ["<|im_end|>", f"token_id:{tokenizer.vocab_size}"]


def test_sentencepiece_keeps_its_spaces_and_bytes():
    texts = TokenTexts(HfTokenizer(SENTENCEPIECE))
    assert [texts.text(token) for token in range(4)] == ["<s>", " jay", "s", "\ufffd"]
    assert texts.data(3) == [0xE2]
    assert texts.pieces([1, 2]) == ["▁jay", "s"]
