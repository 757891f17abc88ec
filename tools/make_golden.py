"""A script that makes ``tests/data/golden``: tiny random checkpoints and what ``transformers`` computes from them.

It is run once, by hand, in an environment of its own (the project does not depend on these)::

    pip install torch transformers tokenizers
    python tools/make_golden.py tests/data/golden

Each folder is a complete Hugging Face checkpoint plus ``golden.npz``: for every prompt ``i`` its tokens (``prompt_i``),
logits after the rows ``rows_i`` (``logits_i``, float32) and a greedy continuation (``greedy_i``). All are computed in
float32 on one thread; half-precision checkpoints are the same values widened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 300
GREEDY_TOKENS = 32
PROMPT_LENGTHS = (3, 21, 90)
LOGIT_ROWS = 12
# Float32 sums in another order differ by about 1e-6; a greedy choice closer than this would test luck.
MARGIN_MIN = 2e-3

SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = [
    "the prefix of a prompt is computed once and never twice",
    "a block of tokens has a key and equal keys mean equal prefixes",
    "Übergröße, naïve café, 日本語のテキスト, emoji 🙂🙃 and numbers 0123456789",
    "def step(self, prefills, decodes): return self.engine.step(prefills, decodes)\n\tindented",
] * 8

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, tuple[Any, Any, dict[str, Any], torch.dtype, str]] = {
    "llama-f32": (LlamaConfig, LlamaForCausalLM, {}, torch.float32, "5GB"),
    "llama-bf16-rope3-tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True, "num_key_value_heads": 1},
        torch.bfloat16,
        "5GB",
    ),
    "qwen2-f32-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}, torch.float32, "5GB"),
    "qwen2-f16-sharded": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"num_attention_heads": 6, "hidden_size": 48, "rope_theta": 1e6},
        torch.float16,
        "40KB",
    ),
    "qwen3-f32": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}, torch.float32, "5GB"),
}


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draws norm weights off one and biases off zero, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(SMALL["initializer_range"] * noise)


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Returns the continuation without any cache, and the smallest gap between the best and the second best logit."""
    tokens, margin = list(prompt), float("inf")
    for _ in range(GREEDY_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = torch.topk(logits, 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margin


def make_variant(folder: Path, name: str, tokenizer: Tokenizer) -> None:
    config_class, model_class, changes, dtype, shard = VARIANTS[name]
    for seed in range(100):
        model = model_class(config_class(**{**SMALL, **changes})).eval()
        randomise(model, seed)
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        rng = np.random.default_rng(seed)
        arrays: dict[str, np.ndarray] = {}
        margin_min = float("inf")
        with torch.no_grad():
            for i, length in enumerate(PROMPT_LENGTHS):
                prompt = rng.integers(len(SPECIAL), VOCAB, length).tolist()
                logits = wide(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
                rows = np.unique(np.linspace(0, length - 1, LOGIT_ROWS).astype(np.int64))
                continuation, margin = greedy(wide, prompt)
                margin_min = min(margin_min, margin)
                arrays[f"prompt_{i}"] = np.array(prompt, dtype="<u4")
                arrays[f"rows_{i}"] = rows
                arrays[f"logits_{i}"] = logits[rows].astype("<f4")
                arrays[f"greedy_{i}"] = np.array(continuation, dtype="<u4")
        if margin_min >= MARGIN_MIN:
            break
        for stale in folder.glob("*.safetensors*"):
            stale.unlink()
    else:
        raise SystemExit(f"{name}: no seed has a margin of {MARGIN_MIN}")
    np.savez_compressed(folder / "golden.npz", **arrays)  # type: ignore[arg-type]  # names, not allow_pickle
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    if name == "qwen3-f32":
        generation = {"bos_token_id": 0, "eos_token_id": [1, 3], "suppress_tokens": [0, 2]}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    repeats = max(len(set(arrays[f"greedy_{i}"].tolist())) for i in range(len(PROMPT_LENGTHS)))
    print(f"{name}: seed {seed}, margin {margin_min:.4f}, most distinct greedy tokens {repeats}")


def main() -> None:
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    tokenizer = make_tokenizer()
    for name in VARIANTS:
        folder = target / name
        folder.mkdir(parents=True, exist_ok=True)
        make_variant(folder, name, tokenizer)


if __name__ == "__main__":
    main()
