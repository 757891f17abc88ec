"""Model weights as float32 matrices, ready for ``matrix @ columns``.

They come from a Hugging Face checkpoint folder (one or several safetensors files; float32, float16, bfloat16), or from
the built-in model's seed. A checkpoint is checked before it is used: a missing tensor, a wrong shape or type, or a
truncated file is an :class:`InvalidArgument` that names the tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import InvalidArgument
from pinyon.model.builtin import BUILTIN_SEED
from pinyon.model.card import ModelCard
from pinyon.model.checkpoint import Tensor, checkpoint_files, read_header
from pinyon.model.config import ModelConfig

_F32 = npt.NDArray[np.float32]

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer, as C-contiguous matrices ``(outputs, inputs)``; ``qkv``'s outputs are Q, K, then V heads.

    Biases and head norms are None where the architecture has none."""

    input_norm: _F32
    qkv: _F32
    qkv_bias: _F32 | None
    q_norm: _F32 | None
    k_norm: _F32 | None
    output: _F32
    post_norm: _F32
    gate: _F32
    up: _F32
    down: _F32


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of a model; ``embedding`` and ``head``, ``(vocab, hidden)``, are the same array when tied."""

    embedding: _F32
    layers: tuple[LayerWeights, ...]
    final_norm: _F32
    head: _F32


def load_weights(card: ModelCard) -> ModelWeights:
    if card.path is None:
        return builtin_weights(card.config)
    return _assemble(card.config, _Checkpoint(card.path))


def builtin_weights(config: ModelConfig, seed: int = BUILTIN_SEED) -> ModelWeights:
    """Returns random weights, bit for bit the same everywhere: Philox's raw stream scaled to uniform numbers.

    The output head is scaled so that greedy decoding wanders instead of repeating one token. Keys attend sharply enough
    that the text depends on all of the prompt. Raises ``ValueError`` for architectures with biases or head norms."""
    if config.qkv_bias or config.qk_norm:
        raise ValueError("the built-in weights are plain Llama")
    source = _UniformSource(seed)
    hidden = config.hidden_size
    embedding = source.matrix(config.vocab_size, hidden, 1.0)
    layers = tuple(_builtin_layer(config, source) for _ in range(config.num_layers))
    head = source.matrix(config.vocab_size, hidden, 3.0 * hidden**-0.5)
    # Shorter rows have smaller logits: EOS wins now and then, not every hundredth token.
    head[list(config.eos_token_ids)] *= np.float32(0.75)
    return ModelWeights(embedding, layers, np.ones(hidden, np.float32), head)


def _builtin_layer(config: ModelConfig, source: _UniformSource) -> LayerWeights:
    hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_out, kv_out = config.num_heads * dim, config.num_kv_heads * dim
    return LayerWeights(
        input_norm=np.ones(hidden, np.float32),
        qkv=source.matrix(q_out + 2 * kv_out, hidden, 1.4 * hidden**-0.5),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=source.matrix(hidden, q_out, 1.5 * q_out**-0.5),
        post_norm=np.ones(hidden, np.float32),
        gate=source.matrix(wide, hidden, 1.4 * hidden**-0.5),
        up=source.matrix(wide, hidden, 1.4 * hidden**-0.5),
        down=source.matrix(hidden, wide, 1.4 * wide**-0.5),
    )


class _UniformSource:
    """A source of uniform numbers with a given standard deviation.

    It uses ``random_raw``, which is Philox itself: unlike NumPy's distributions, its stream is fixed by the algorithm
    and not by the NumPy version."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)

    def matrix(self, rows: int, columns: int, deviation: float) -> _F32:
        count = rows * columns
        raw = np.asarray(self._bits.random_raw(-(-count // 2)), dtype="<u8").view("<u4")[:count]
        # 24 bits fit a float32 exactly; (x + 0.5) / 2^24 - 0.5 has deviation 12^-0.5.
        values = (raw >> np.uint32(8)).astype(np.float32)
        values += np.float32(0.5)
        values *= np.float32(2.0**-24)
        values -= np.float32(0.5)
        values *= np.float32(deviation * 12**0.5)
        return values.reshape(rows, columns)


class _Checkpoint:
    """The tensors of all files of a folder by name; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, tuple[Path, Tensor]] = {}
        for path in checkpoint_files(folder):
            for name, info in read_header(path)[1].items():
                if name in self._files:
                    raise _bad(f"tensor {name} is in both {self._files[name][0].name} and {path.name}")
                if info.dtype not in _ITEM_BYTES:
                    raise _bad(f"tensor {name} is {info.dtype}: only F32, F16 and BF16 are supported")
                if info.size != math.prod(info.shape) * _ITEM_BYTES[info.dtype]:
                    raise _bad(f"tensor {name} of {path.name} has {info.size} bytes, its shape needs another number")
                self._files[name] = (path, info)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...]) -> _F32:
        """Returns a tensor as float32, C-contiguous, of exactly ``shape``."""
        if name not in self._files:
            raise _bad(f"tensor {name} is missing")
        path, info = self._files[name]
        if info.shape != shape:
            raise _bad(f"tensor {name} has shape {list(info.shape)}, the configuration needs {list(shape)}")
        raw = np.memmap(path, dtype=np.uint8, mode="r", offset=info.start, shape=(info.size,))
        if info.dtype == "F32":
            return np.array(raw.view("<f4").reshape(shape), dtype=np.float32)
        if info.dtype == "F16":
            return raw.view("<f2").reshape(shape).astype(np.float32)
        # A bfloat16 is the upper half of a float32.
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(shape)


def _assemble(config: ModelConfig, checkpoint: _Checkpoint) -> ModelWeights:
    hidden, dim, wide = config.hidden_size, config.head_dim, config.intermediate_size
    q_out, kv_out = config.num_heads * dim, config.num_kv_heads * dim

    layers = []
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        attention = prefix + "self_attn."
        parts = (("q_proj", q_out), ("k_proj", kv_out), ("v_proj", kv_out))
        layers.append(
            LayerWeights(
                input_norm=checkpoint.read(prefix + "input_layernorm.weight", (hidden,)),
                qkv=np.concatenate([checkpoint.read(f"{attention}{p}.weight", (n, hidden)) for p, n in parts]),
                qkv_bias=(
                    np.concatenate([checkpoint.read(f"{attention}{p}.bias", (n,)) for p, n in parts])
                    if config.qkv_bias
                    else None
                ),
                q_norm=checkpoint.read(attention + "q_norm.weight", (dim,)) if config.qk_norm else None,
                k_norm=checkpoint.read(attention + "k_norm.weight", (dim,)) if config.qk_norm else None,
                output=checkpoint.read(attention + "o_proj.weight", (hidden, q_out)),
                post_norm=checkpoint.read(prefix + "post_attention_layernorm.weight", (hidden,)),
                gate=checkpoint.read(prefix + "mlp.gate_proj.weight", (wide, hidden)),
                up=checkpoint.read(prefix + "mlp.up_proj.weight", (wide, hidden)),
                down=checkpoint.read(prefix + "mlp.down_proj.weight", (hidden, wide)),
            )
        )
    if not config.qkv_bias and "model.layers.0.self_attn.q_proj.bias" in checkpoint:
        raise _bad(f"has QKV biases, which {config.architecture} models do not")
    embedding = checkpoint.read("model.embed_tokens.weight", (config.vocab_size, hidden))
    shape = (config.vocab_size, hidden)
    head = embedding if config.tie_word_embeddings else checkpoint.read("lm_head.weight", shape)
    return ModelWeights(embedding, tuple(layers), checkpoint.read("model.norm.weight", (hidden,)), head)


def _bad(what: str) -> InvalidArgument:
    return InvalidArgument(f"checkpoint: {what}", field="model")
