from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.model.builtin import builtin_config
from pinyon.model.config import ModelConfig, RopeScaling

GOLDEN = Path(__file__).parents[2] / "data" / "golden"

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_llama_as_published() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert (config.architecture, config.head_dim, config.group_size) == ("llama", 16, 2)
    assert (config.rope_theta, config.rope_scaling, config.max_context) == (5e5, None, 512)
    assert (config.eos_token_ids, config.bos_token_id, config.suppress_tokens) == ((2,), 1, ())
    assert not config.qkv_bias
    assert not config.qk_norm


def test_architectures_differ_in_bias_and_norm() -> None:
    qwen2 = ModelConfig.from_hf({**LLAMA, "model_type": "qwen2"})
    qwen3 = ModelConfig.from_hf({**LLAMA, "model_type": "qwen3"})
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_generation_config_wins() -> None:
    generation = {"eos_token_id": [2, 5], "suppress_tokens": [7, 8], "bos_token_id": 3}
    config = ModelConfig.from_hf(LLAMA, generation)
    assert (config.eos_token_ids, config.suppress_tokens, config.bos_token_id) == ((2, 5), (7, 8), 3)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scalings(key: str) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    assert ModelConfig.from_hf({**LLAMA, key: linear}).rope_scaling == RopeScaling("linear", 2.0)
    llama3 = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 64,
    }
    assert ModelConfig.from_hf({**LLAMA, key: llama3}).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert ModelConfig.from_hf({**LLAMA, key: {"rope_type": "default"}}).rope_scaling is None


def test_rope_theta_in_rope_parameters() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    assert ModelConfig.from_hf({**config, "rope_parameters": {"rope_theta": 7.0}}).rope_theta == 7.0
    assert ModelConfig.from_hf(config).rope_theta == 10_000.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": 66}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"eos_token_id": 100}, "token id"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ModelConfig.from_hf({**LLAMA, **change})
    if field in ("rms_eps",):
        field = "rms_norm_eps"
    assert caught.value.field == field
    assert field in caught.value.message


def test_suppressing_everything_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="leaves no token"):
        ModelConfig.from_hf(LLAMA, {"suppress_tokens": list(range(100))})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([*LLAMA, "rope_scaling", "rope_parameters", "layer_types", "head_dim", "partial_rotary_factor"])


@given(changes=st.dictionaries(KEYS, JSON, max_size=4), generation=JSON)
def test_any_json_loads_or_is_an_invalid_argument(changes: dict[str, Any], generation: Any) -> None:
    with contextlib.suppress(InvalidArgument):
        ModelConfig.from_hf({**LLAMA, **changes}, generation)


def test_published_tiny_checkpoints_load() -> None:
    for folder in GOLDEN.iterdir():
        ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


def test_kv_layout() -> None:
    layout = builtin_config().kv_layout(32)
    assert layout.shape == (4, 2, 32, 4, 32)
    assert layout.block_bytes == 4 * 2 * 32 * 4 * 32 * 4
