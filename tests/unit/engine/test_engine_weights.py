from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pinyon.core.errors import InvalidArgument
from pinyon.model.builtin import builtin_config
from pinyon.model.card import load_card
from services.worker.engines.weights import builtin_weights, load_weights

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "llama-f32", tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path) -> object:
    return load_weights(load_card(str(folder)))


def test_values_are_those_of_the_safetensors_library(folder: Path) -> None:
    weights = load_weights(load_card(str(folder)))
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(weights.embedding, tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights.layers[1].down, tensors["model.layers.1.mlp.down_proj.weight"])
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(weights.layers[0].qkv[: len(q)], q)


def test_tied_embeddings_are_one_array() -> None:
    weights = load_weights(load_card(str(GOLDEN / "qwen2-f32-tied")))
    assert weights.head is weights.embedding


def test_f16_is_widened_exactly() -> None:
    weights = load_weights(load_card(str(GOLDEN / "qwen2-f16-sharded")))
    assert weights.embedding.dtype == np.float32
    np.testing.assert_array_equal(weights.embedding, weights.embedding.astype(np.float16).astype(np.float32))


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(InvalidArgument, match=r"model\.layers\.1\.self_attn\.k_proj\.weight is missing"):
        load(folder)


def test_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)}))
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight has shape \[31\], .* needs \[32\]"):
        load(folder)


def test_wrong_type_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.zeros(32, np.float64)}))
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight is F64"):
        load(folder)


def test_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2-f16-sharded", copy)
    (copy / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"model-00002-of-00004\.safetensors is missing"):
        load(copy)


def test_index_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2-f16-sharded", copy)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    with pytest.raises(InvalidArgument, match="not a plain file name"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_truncated_file_is_an_error(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(InvalidArgument, match=r"truncated|not a safetensors"):
        load(folder)


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [32], "data_offsets": [0, 129]},
        {"dtype": "F32", "shape": [32], "data_offsets": [128, 0]},
        {"dtype": "F32", "shape": [-32], "data_offsets": [0, 128]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [32]},
        {"dtype": "F32", "shape": 32, "data_offsets": [0, 128]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**66]},
        "nonsense",
        None,
    ],
)
def test_malformed_header_entry_names_the_tensor(folder: Path, entry: object) -> None:
    header, rest = header_of(folder)
    header["model.norm.weight"] = entry
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + rest)
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight"):
        load(folder)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 20000])
def test_malformed_header_is_an_error(folder: Path, raw: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 64)
    with pytest.raises(InvalidArgument, match=r"model\.safetensors (is not valid JSON|must hold a JSON object)"):
        load(folder)


def test_builtin_weights_are_the_same_everywhere() -> None:
    """The raw stream is Philox's: these values may never change without another recipe name."""
    weights = builtin_weights(builtin_config())
    expected = [float.fromhex(x) for x in EMBEDDING_START]
    assert weights.embedding[0, :3].tolist() == expected
    assert builtin_weights(builtin_config(), seed=1).embedding[0, 0] != weights.embedding[0, 0]


EMBEDDING_START = ["-0x1.eb9d3c0000000p-1", "0x1.ebb9c60000000p-2", "-0x1.70baa80000000p-3"]
