"""Contradicting tokenizer files give the result of ``transformers``, and odd files do no harm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.model.card import ModelCard, load_card
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer
from pinyon.model.tokenizer_files import named_tokens, tokenizer_class

GOLDEN = Path(__file__).parents[2] / "data" / "golden_text"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "settings.json").read_text())


def card_with(folder: Path, case: dict[str, Any], **config: Any) -> ModelCard:
    shutil.copytree(GOLDEN / case["checkpoint"], folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": case["model_type"]} | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(case["settings"]))
    return load_card(str(folder))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_settings(tmp_path: Path, number: int) -> None:
    case = CASES[number]
    card = card_with(tmp_path, case, vocab_size=1000)  # room for the tokens that the settings add
    for text in case["texts"]:
        assert card.tokenizer.encode(text["text"]).tolist() == text["tokens"], text["text"]
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    kind = tokenizer_class(rules, case["settings"], {"model_type": case["model_type"]})
    assert named_tokens(case["settings"], kind) == case["named"]


def test_the_settings_make_a_difference() -> None:
    """The test above would otherwise prove nothing about the settings."""
    found: dict[str, set[str]] = {}
    for case in CASES:
        found.setdefault(case["checkpoint"], set()).add(json.dumps([text["tokens"] for text in case["texts"]]))
    assert all(len(values) > 1 for values in found.values())


def test_a_named_token_without_an_embedding_is_text(tmp_path: Path) -> None:
    case = {"checkpoint": "llama-bytes-bos", "model_type": "llama", "settings": {"pad_token": "<|pad|>"}}
    full, roomy = card_with(tmp_path / "a", case), card_with(tmp_path / "b", case, vocab_size=417)
    assert isinstance(full.tokenizer, HfTokenizer)
    assert isinstance(roomy.tokenizer, HfTokenizer)
    assert "<|pad|>" not in full.tokenizer.special_tokens
    assert roomy.tokenizer.special_tokens["<|pad|>"] == 416
    assert roomy.tokenizer.encode("<|pad|>", add_special_tokens=False).tolist() == [416]


def test_an_older_checkpoint_names_its_tokens_in_their_own_file(tmp_path: Path) -> None:
    case = {"checkpoint": "llama-bytes-bos", "model_type": "llama", "settings": {"chat_template": "{{ bos_token }}"}}
    shutil.copytree(GOLDEN / "llama-bytes-bos", tmp_path, dirs_exist_ok=True)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|bos|>", "lstrip": false}}')
    assert card_with(tmp_path, case).chat_template.render([{"role": "user", "content": "x"}]) == "<|bos|>"


@pytest.mark.parametrize("changes", [{"added_tokens": 3}, {"added_tokens": [{"content": "x"}]}, {"model": 3}])
def test_a_malformed_tokenizer_is_an_invalid_argument(tmp_path: Path, changes: dict[str, Any]) -> None:
    shutil.copytree(GOLDEN / "llama-pieces-bos", tmp_path, dirs_exist_ok=True)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules | changes))
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        load_card(str(tmp_path))


@pytest.mark.parametrize("settings", [{"added_tokens_decoder": {"x": 3, "7": {}}}, {"bos_token": 3}, {"legacy": "?"}])
def test_settings_of_odd_types_do_no_harm(tmp_path: Path, settings: dict[str, Any]) -> None:
    case = {"checkpoint": "llama-bytes-bos", "model_type": "llama", "settings": settings}
    assert card_with(tmp_path, case).tokenizer.encode("a").tolist()[0] == 0


def test_the_built_in_models_prompts_are_their_bytes() -> None:
    for text in ("", "a<|eos|>é"):
        for added in (False, True):
            assert (
                ByteTokenizer().encode(text, add_special_tokens=added).tobytes()
                == np.array(list(text.encode()), "<u4").tobytes()
            )
