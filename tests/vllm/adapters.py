"""LoRA adapters with random weights for the small checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RANK = 4


def write_adapter(folder: Path, checkpoint: Path, seed: int) -> Path:
    """Writes an adapter of the queries and values of each layer, strong enough to change most answers."""
    config = json.loads((checkpoint / "config.json").read_text())
    rng, hidden = np.random.default_rng(seed), config["hidden_size"]
    widths = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in widths.items():
            shapes = {"lora_A": (RANK, hidden), "lora_B": (heads * config["head_dim"], RANK)}
            for part, shape in shapes.items():
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight"
                tensors[key] = rng.normal(0.0, 0.3, shape).astype(np.float32)
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0,
        "bias": "none", "target_modules": sorted(widths), "base_model_name_or_path": "", "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """Returns the file: the header's length, the header with each tensor's place, the data."""
    header: dict[str, object] = {}
    size = 0
    for name, each in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(each.shape), "data_offsets": [size, size + each.nbytes]}
        size += each.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in tensors.values())
