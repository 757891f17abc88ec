"""A model with a Hugging Face BPE tokenizer for ``bench/e2e.py``, and texts that read like any.

Both are of this repository's own documents, so that nothing is downloaded. Every 20th word is new, as names, numbers
and mistyped words are in a text. The vocabulary has some 10,000 tokens of 3.6 characters; large ones have 4 to 4.5.
There are no weights: an engine that computes nothing needs none."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from string import ascii_lowercase

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pinyon.model.builtin import builtin_config

DOCS = Path(__file__).resolve().parent.parent / "docs"
VOCABULARY = 16384
"""An upper bound: there are not so many different pieces."""
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pieces into which Llama 3 and Qwen split a text before merging."""
END = "<|end|>"
NEW_EVERY = 20
"""One word in so many never came before, so that a tokenizer that remembers words does not know it."""


@cache
def _documents() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("**/*.md"))]


@cache
def _words() -> list[str]:
    return [word for text in _documents() for word in text.split() if word.isascii()]


def words(random_: random.Random, size: int) -> str:
    """Returns ``size`` bytes of words as frequent as in the documents, in random order, and new ones."""
    return _text(random_, size, NEW_EVERY)


def new_words(random_: random.Random, size: int) -> str:
    """Returns ``size`` bytes of new words alone, the most expensive text for a tokenizer that remembers words."""
    return _text(random_, size, 1)


def _text(random_: random.Random, size: int, new_every: int) -> str:
    known, text = _words(), ""
    while len(text) < size:
        some = random_.choices(known, k=size // 5 + 1)
        for at in range(0, len(some), new_every):
            some[at] = "".join(random_.choices(ascii_lowercase, k=random_.randint(4, 10)))
        text += " ".join(some) + "\n"
    return text[:size]


def make_model(folder: Path) -> Path:
    """Makes a checkpoint of the built-in model's shape in a new folder; any engine that needs no weights serves it."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_documents(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = builtin_config()
    config = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context,
        "eos_token_id": tokenizer.token_to_id(END),
    }
    (folder / "config.json").write_text(json.dumps(config))
    head = b"{}"  # no tensors
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    return folder
