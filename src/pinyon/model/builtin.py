"""The default model: small, seeded, random, made in memory. Its output is gibberish, but printable and not in a loop.

All of the model follows from this file, so its fingerprint is the hash of these values."""

from __future__ import annotations

from pinyon.model.config import ModelConfig
from pinyon.model.tokenizer import ByteTokenizer

BUILTIN_SEED = 20240607

BUILTIN_RECIPE = "uniform-philox-1"
"""The name of the recipe for weights (``services.worker.engines.weights``); another recipe needs another name."""


def builtin_config() -> ModelConfig:
    """Returns a model of about 3.1 M parameters; only printable ASCII, newline and EOS can be sampled."""
    sampled = {*range(0x20, 0x7F), 0x0A, ByteTokenizer.EOS}
    return ModelConfig(
        architecture="llama",
        vocab_size=ByteTokenizer.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        max_context=40_960,
        eos_token_ids=(ByteTokenizer.EOS,),
        bos_token_id=ByteTokenizer.BOS,
        suppress_tokens=tuple(t for t in range(ByteTokenizer.VOCAB_SIZE) if t not in sampled),
    )
