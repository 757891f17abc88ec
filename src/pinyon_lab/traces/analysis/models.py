"""The paper's models and its machine, in bytes."""

from __future__ import annotations

from typing import NamedTuple

HBM_BYTES = 80 << 30
"""The HBM of one A800-80GB (§4.3)."""
ACTIVATIONS = 0.1
"""The share of the HBM for activations and the rest. The paper subtracts it without a number; a tenth is what vLLM,
which it uses, leaves free by default. As a check, 5,953 tokens of Qwen2-7B are 0.56 % there (§3.5), 0.55 % here."""
VALUE_BYTES = 2
KV_HBM_FORMULA = f"HBM for KV (modelled): GPUs × 80 GiB × {1 - ACTIVATIONS:g} − 2 bytes × parameters."


class ServingModel(NamedTuple):
    """A model on the GPUs of one serving instance (§4.3)."""

    name: str
    layers: int
    kv_heads: int
    head_values: int
    parameters: int
    gpus: int
    source: str

    @property
    def token_bytes(self) -> int:
        """The KV bytes of one token: a key and a value for each layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_values * VALUE_BYTES

    @property
    def kv_hbm_bytes(self) -> float:
        """The HBM left for KV: that of all GPUs less activations and parameters."""
        return self.gpus * HBM_BYTES * (1 - ACTIVATIONS) - self.parameters * VALUE_BYTES


MODELS = (
    ServingModel(
        "Qwen2-7B", 28, 4, 128, 7_615_616_512, 1, "printed: 0.875 MB for 16 tokens (§3.5); computed: the same"
    ),
    ServingModel("Llama2-13B", 40, 40, 128, 13_015_864_320, 1, "computed from its public configuration"),
    ServingModel(
        *("Llama3-70B", 80, 8, 128, 70_553_706_496, 4), "printed: 320 KB (Mooncake §5.3.1); computed: the same"
    ),
)
