from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.model.card import BUILTIN_NAME, load_card
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "qwen3-f32", tmp_path / "model")
    return tmp_path / "model"


def test_builtin_card() -> None:
    card = load_card()
    assert (card.name, card.path) == (BUILTIN_NAME, None)
    assert isinstance(card.tokenizer, ByteTokenizer)
    assert card.tokenizer.vocab_size == card.config.vocab_size
    assert len(bytes.fromhex(card.fingerprint)) == 16
    assert load_card(None, "other").name == "other"
    assert load_card(None, "other").fingerprint == card.fingerprint


def test_checkpoint_card(folder: Path) -> None:
    card = load_card(str(folder))
    assert (card.name, card.path) == ("model", folder)
    assert isinstance(card.tokenizer, HfTokenizer)
    assert card.config.eos_token_ids == card.tokenizer.eos_token_ids == (1, 3)
    assert card.config.suppress_tokens == (0, 2)


def test_a_folder_named_by_a_dot_has_its_name_in_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=f"^{tmp_path.name}: config.json is missing"):
        load_card(".")


def bytes_read() -> int:
    """Returns the bytes that this process has read by system calls so far, from cache or disk."""
    return int(re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE).group(1))


def test_loading_a_card_is_cheap(folder: Path) -> None:
    """The loader reads kilobytes, whatever the weights' size: a sparse gigabyte stands for them."""
    path = folder / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(1 << 30)
    before = bytes_read()
    load_card(str(folder))
    assert bytes_read() - before < 4 << 20


def test_fingerprint_follows_config_names_shapes_and_values(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path), path)
    before = load_card(str(folder)).fingerprint
    assert load_card(str(folder), "another-name").fingerprint == before
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.v_proj.weight"] += np.float32(1e-3)
    save_file(tensors, path)
    values = load_card(str(folder)).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert len({before, values, load_card(str(folder)).fingerprint}) == 3


def test_every_golden_checkpoint_has_its_own_fingerprint() -> None:
    prints = {load_card(str(path)).fingerprint for path in GOLDEN.iterdir()}
    assert len(prints) == len(list(GOLDEN.iterdir()))


def test_no_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_card(str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InvalidArgument, match=name.split(".")[-1]):
        load_card(str(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1} x'])
def test_a_malformed_file_is_an_invalid_argument(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidArgument):
        load_card(str(folder))


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 299}))
    with pytest.raises(InvalidArgument, match="300 tokens"):
        load_card(str(folder))


def test_chat_template_sources(folder: Path) -> None:
    message = [{"role": "user", "content": "hi"}]
    assert "<|im_start|>user\nhi<|im_end|>" in load_card(str(folder)).chat_template.render(message)
    settings = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "X"}, {"name": "default", "template": "named {{ messages[0].content }}"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert load_card(str(folder)).chat_template.render(message) == "named hi"
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert load_card(str(folder)).chat_template.render(message) == "file hi"
    (folder / "chat_template.jinja").unlink()
    settings.write_text("{}")
    assert load_card(str(folder)).chat_template.render(message) == "user: hi\nassistant:"
    settings.write_text('{"chat_template": 3}')
    with pytest.raises(InvalidArgument, match="chat_template must be a string"):
        load_card(str(folder))
