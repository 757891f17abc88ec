"""A checkpoint's tokenizer files, read as ``transformers`` (version 5, as vLLM uses it) reads them.

Only the post-processor in ``tokenizer.json`` says which tokens go around a text: ``add_bos_token`` and
``add_eos_token`` of ``tokenizer_config.json`` have no effect if it exists. But ``tokenizer_config.json`` adds special
tokens. For two tokenizer classes, those of the first Llamas and of Qwen, ``transformers`` keeps only vocabulary, merges
and post-processor and adds its own rules. ``tests/data/golden_text`` (``tools/make_golden_text.py``) checks this
against ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

TokenizerClass = Literal["llama", "qwen2"] | None

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULTS: dict[TokenizerClass, dict[str, str]] = {
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "qwen2": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    None: {},
}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SPACE = "\u2581"  # SentencePiece's mark for a space
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_class(rules: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any]) -> TokenizerClass:
    """Returns the class whose own rules apply; None if ``tokenizer.json`` is taken as it is.

    ``rules``, ``settings`` and ``config`` are the objects of tokenizer.json, tokenizer_config.json and config.json. A
    class that contradicts the file (bytes as characters, or not) is ignored: its rules would produce nonsense."""
    model = rules.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        return None
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = named.removesuffix("Fast") if isinstance(named, str) else ""
    kind = config.get("model_type")
    if name == "Qwen2Tokenizer" or kind == "qwen2" or (kind == "qwen3" and not name):
        return "qwen2" if _speak_of_bytes(rules, "pre_tokenizer", "decoder") else None
    if name == "LlamaTokenizer" and not _speak_of_bytes(rules, "pre_tokenizer", "decoder", "post_processor"):
        return "llama"
    return None


def _speak_of_bytes(rules: Mapping[str, Any], *parts: str) -> bool:
    return '"ByteLevel"' in json.dumps([rules.get(part) for part in parts])


def named_tokens(settings: Mapping[str, Any], kind: TokenizerClass) -> dict[str, str]:
    """Returns the named special tokens (``bos_token``, ``eos_token``, …) that the checkpoint has."""
    found = {}
    for name in _NAMED:
        text = _content(settings[name]) if name in settings else _DEFAULTS[kind].get(name)
        if text:
            found[name] = text
    return found


def tokenizer_rules(
    rules: Mapping[str, Any], settings: Mapping[str, Any], kind: TokenizerClass, vocab_size: int
) -> dict[str, Any]:
    """Returns tokenizer.json's object combined with the other files and the rules of the class.

    ``vocab_size`` is the model's: a token named in ``settings`` without a place in the vocabulary and without an
    embedding is left out."""
    made = dict(rules)
    if kind == "llama":
        _put_llama_rules(made, settings)
    elif kind == "qwen2":
        _put_qwen_rules(made, settings)
    made["added_tokens"] = _added_tokens(rules, settings, kind, vocab_size)
    return made


def _put_llama_rules(made: dict[str, Any], settings: Mapping[str, Any]) -> None:
    prefix = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if prefix else "never"
    made["model"] = _bpe(made["model"], fuse_unk=True, byte_fallback=True)
    made["normalizer"] = None
    made["pre_tokenizer"] = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    made["decoder"] = {"type": "Sequence", "decoders": decoders}


def _put_qwen_rules(made: dict[str, Any], settings: Mapping[str, Any]) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made["model"] = _bpe(made["model"], fuse_unk=False, byte_fallback=False)
    made["normalizer"] = {"type": "NFC"}
    made["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _QWEN_WORDS}, "behavior": "Isolated", "invert": False},
            byte_level | {"add_prefix_space": bool(settings.get("add_prefix_space")), "use_regex": False},
        ],
    }
    made["decoder"] = byte_level


def _bpe(model: Mapping[str, Any], *, fuse_unk: bool, byte_fallback: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "vocab": model["vocab"],
        "merges": model.get("merges", []),
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "ignore_merges": False,
    }


def _added_tokens(
    rules: Mapping[str, Any], settings: Mapping[str, Any], kind: TokenizerClass, vocab_size: int
) -> list[dict[str, Any]]:
    """Returns the added tokens: later entries change earlier ones of equal text; unknown ones get the next id."""
    listed = settings.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else None
    own = [token for token in rules.get("added_tokens") or () if _content(token)]
    # A class that rebuilds the tokenizer keeps only those added tokens of tokenizer.json that the settings list.
    tokens = {} if kind is not None and listed is not None else {token["content"]: token for token in own}
    by_id = sorted((int(i), token) for i, token in (listed or {}).items() if str(i).isdigit() and _content(token))
    for _, token in by_id:
        tokens[token["content"]] = token
    names = named_tokens(settings, kind)
    for text in names.values():
        if text in tokens:
            tokens[text] = {**tokens[text], "special": True}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    extra = list(extra.values()) if isinstance(extra, dict) else list(extra) if isinstance(extra, list) else []
    for token in (*(settings.get(name, text) for name, text in names.items()), *extra):
        content = _content(token)
        if content and (content not in tokens or kind == "qwen2"):
            flags = token if isinstance(token, dict) and kind != "qwen2" else {}
            tokens[content] = {"content": content, **flags, "special": True}
    return _with_ids(tokens, rules, vocab_size)


def _with_ids(
    tokens: Mapping[str, Mapping[str, Any]], rules: Mapping[str, Any], vocab_size: int
) -> list[dict[str, Any]]:
    vocab = rules["model"].get("vocab") if isinstance(rules.get("model"), dict) else None
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    ids |= {token["content"]: token["id"] for token in rules.get("added_tokens") or () if _content(token)}
    following = max(ids.values(), default=-1) + 1
    made = []
    for text, token in tokens.items():
        token_id = ids.get(text)
        if token_id is None:
            if following >= vocab_size:
                continue
            token_id, following = following, following + 1
        made.append({"id": token_id, "content": text} | {flag: bool(token.get(flag)) for flag in _FLAGS})
    return sorted(made, key=lambda token: token["id"])


def _content(token: object) -> str | None:
    """Returns a token's text, in either of the forms that the files have."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
