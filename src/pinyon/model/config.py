"""The shape of a Llama-family model, read from a Hugging Face ``config.json`` and ``generation_config.json``.

Three architectures: Llama (the base), Qwen2 (adds a bias to Q, K and V), Qwen3 (adds an RMSNorm over each head of Q and
K). Features that this code does not compute (sliding windows, quantised weights, other rope scalings, …) are refused by
name: a model that loads is computed as its authors meant it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout

Architecture = Literal["llama", "qwen2", "qwen3"]
_N = TypeVar("_N", int, float)

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# Far above any real model, but low enough that a hostile config.json cannot exhaust the machine's memory.
VOCAB_MAX = 2_000_000
HIDDEN_MAX = 131_072
LAYERS_MAX = 1_024
HEADS_MAX = 1_024
HEAD_DIM_MAX = 1_024
CONTEXT_MAX = 16_777_216
SUPPRESS_MAX = VOCAB_MAX


@dataclass(frozen=True)
class RopeScaling:
    """The stretching of rotary frequencies beyond the trained context.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only the low frequencies and blends in between
    (Llama 3.1); the last three fields belong to it."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise _bad("rope_scaling.factor", f"must be at least 1, got {self.factor}")
        if self.kind == "llama3":
            if not 0.0 < self.low_freq_factor < self.high_freq_factor:
                raise _bad("rope_scaling.low_freq_factor", "must be positive and below high_freq_factor")
            if self.original_context <= 0:
                raise _bad("rope_scaling.original_max_position_embeddings", "must be positive")


@dataclass(frozen=True)
class ModelConfig:
    """All values that the engine needs to compute the model, and the load balancer to bound a request.

    ``max_context`` counts tokens of prompt and answer together. ``eos_token_ids`` may be empty (no end by itself).
    ``suppress_tokens`` are never sampled. Raises :class:`InvalidArgument` naming the field."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    max_context: int
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in _ARCHITECTURES:
            raise _bad("model_type", f"must be one of {sorted(_ARCHITECTURES)}, got {self.architecture!r}")
        for name, limit in (
            ("vocab_size", VOCAB_MAX),
            ("hidden_size", HIDDEN_MAX),
            ("intermediate_size", 8 * HIDDEN_MAX),
            ("num_layers", LAYERS_MAX),
            ("num_heads", HEADS_MAX),
            ("num_kv_heads", HEADS_MAX),
            ("head_dim", HEAD_DIM_MAX),
            ("max_context", CONTEXT_MAX),
        ):
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise _bad(name, f"must be in [1, {limit}], got {value}")
        if self.num_heads % self.num_kv_heads:
            raise _bad("num_key_value_heads", f"{self.num_kv_heads} must divide num_attention_heads {self.num_heads}")
        if self.head_dim % 2:
            raise _bad("head_dim", f"must be even for rotary embeddings, got {self.head_dim}")
        if not 0.0 < self.rope_theta < float("inf"):
            raise _bad("rope_theta", f"must be positive, got {self.rope_theta}")
        if not 0.0 < self.rms_eps < 1.0:
            raise _bad("rms_norm_eps", f"must be in (0, 1), got {self.rms_eps}")
        ids = (*self.eos_token_ids, *self.suppress_tokens)
        if self.bos_token_id is not None:
            ids = (*ids, self.bos_token_id)
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise _bad("token id", f"{token} is outside the vocabulary of {self.vocab_size}")
        if len(set(self.suppress_tokens)) >= self.vocab_size:
            raise _bad("suppress_tokens", "leaves no token to sample")

    @property
    def group_size(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_layout(self, block_tokens: int) -> KvLayout:
        """Returns the layout of a KV object of ``block_tokens`` tokens (float32)."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_tokens, "float32")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Returns these JSON objects' configuration. Raises :class:`InvalidArgument` for missing, wrong or unsupported
        values."""
        _object("config.json", config)
        if generation_config is not None:
            _object("generation_config.json", generation_config)
        generation = generation_config or {}
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in _ARCHITECTURES:
            raise _bad("model_type", f"must be one of {sorted(_ARCHITECTURES)}, got {kind!r}")
        architecture = _ARCHITECTURES[kind]
        _refuse_unsupported(config, architecture)

        heads = _number(config, "num_attention_heads", int)
        hidden = _number(config, "hidden_size", int)
        if config.get("head_dim") is not None:
            head_dim = _number(config, "head_dim", int)
        elif architecture == "qwen3":
            head_dim = 128  # Qwen3Config's default, which is not derived from the hidden size
        elif heads > 0 and hidden % heads == 0:
            head_dim = hidden // heads
        else:
            raise _bad("num_attention_heads", f"{heads} must divide hidden_size {hidden}")
        theta, scaling = _rope(config)
        tied = config.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise _bad("tie_word_embeddings", f"must be true or false, got {tied!r}")
        bos = config.get("bos_token_id") if generation.get("bos_token_id") is None else generation["bos_token_id"]
        eos = config.get("eos_token_id") if generation.get("eos_token_id") is None else generation["eos_token_id"]
        return cls(
            architecture=architecture,
            vocab_size=_number(config, "vocab_size", int),
            hidden_size=hidden,
            intermediate_size=_number(config, "intermediate_size", int),
            num_layers=_number(config, "num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=_number(config, "num_key_value_heads", int, heads),
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=_number(config, "rms_norm_eps", float, 1e-6),
            max_context=_number(config, "max_position_embeddings", int),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            tie_word_embeddings=tied,
            eos_token_ids=_ids("eos_token_id", eos),
            bos_token_id=None if bos is None else _id("bos_token_id", bos),
            suppress_tokens=_ids("suppress_tokens", generation.get("suppress_tokens")),
        )


def _bad(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"model config: {field} {what}", field=field)


def _refuse_unsupported(config: Mapping[str, Any], architecture: Architecture) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise _bad("hidden_act", f"{config['hidden_act']!r} is not supported (only 'silu')")
    if config.get("quantization_config") is not None:
        raise _bad("quantization_config", "is not supported: only f32, f16 and bf16 weights are")
    for flag in ("attention_bias", "mlp_bias"):
        # Qwen2 always has its QKV bias and ignores the flag.
        if config.get(flag) and not (architecture == "qwen2" and flag == "attention_bias"):
            raise _bad(flag, f"is not supported for {architecture}")
    if config.get("use_sliding_window"):
        raise _bad("use_sliding_window", "is not supported")
    layer_types = config.get("layer_types")
    if layer_types is not None and any(kind != "full_attention" for kind in _list("layer_types", layer_types)):
        raise _bad("layer_types", "other than full_attention are not supported")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise _bad("partial_rotary_factor", "other than 1 is not supported")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns ``(theta, scaling)`` from ``rope_theta`` and ``rope_scaling``; ``rope_parameters`` (transformers ≥ 5)
    overrules both."""
    parameters = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None:
            _object(name, value)
    merged: dict[str, Any] = {**(scaling or {}), **(parameters or {})}
    theta = _number({**config, **merged}, "rope_theta", float, 10_000.0)
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        raise _bad("partial_rotary_factor", "other than 1 is not supported")
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(merged, "factor", float))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            _number(merged, "factor", float),
            _number(merged, "low_freq_factor", float),
            _number(merged, "high_freq_factor", float),
            _number(merged, "original_max_position_embeddings", int),
        )
    raise _bad("rope_scaling", f"of type {kind!r} is not supported (default, linear, llama3 are)")


def _object(field: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise _bad(field, f"must be a JSON object, got {type(value).__name__}")


def _list(field: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(field, f"must be a list, got {type(value).__name__}")
    return value


def _number(config: Mapping[str, Any], name: str, kind: type[_N], default: _N | None = None) -> _N:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise _bad(name, "is missing")
    # bool is an int in Python, not in JSON
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise _bad(name, f"must be a {'whole ' if kind is int else ''}number, got {value!r}")
    try:
        return kind(value)
    except OverflowError:
        raise _bad(name, "is too large") from None


def _id(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(field, f"must be a token id, got {value!r}")
    return value


def _ids(field: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        return (_id(field, value),)
    if len(value) > SUPPRESS_MAX:
        raise _bad(field, f"has {len(value)} entries, at most {SUPPRESS_MAX} are allowed")
    return tuple(_id(field, token) for token in value)
