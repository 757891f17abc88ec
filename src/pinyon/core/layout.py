"""The KV object's layout: one token block's payload, layer-major ``[layer][k|v][token][head][dim]``.

One layer of one block is one contiguous range, so it can move alone while the next layer is still being computed
(Mooncake §3.1 step 3). Offsets are bytes from the start of the object.

Other engines pack a layer of a block in ways of their own. To pinyon that is one opaque range: it is moved whole, and
only between engines that pack alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
PACKING_CHARS_MAX = 256
UNKNOWN_PACKING = "agent"
"""The packing of an engine whose KV nobody else sees: an agent registers it by what it tells."""


@dataclass(frozen=True)
class KvLayout:
    """The shape of a KV object. ``dtype`` is one of float32, float16, bfloat16, or with a ``packing`` any name."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str = "float32"
    packing: str = ""
    """Names the way in which an engine packs a layer of a block; empty: pinyon's own."""
    packed_bytes: int = 0
    """The bytes of one layer of one block; only if there is a packing."""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"KvLayout.{name} must be positive, got {getattr(self, name)}")
        if self.packing:
            if self.packed_bytes <= 0 or len(self.packing) + len(self.dtype) > PACKING_CHARS_MAX:
                raise ValueError(f"a packing needs packed_bytes, and at most {PACKING_CHARS_MAX} characters with dtype")
        elif self.packed_bytes or self.dtype not in _ITEM_BYTES:
            raise ValueError(f"KvLayout.dtype must be one of {sorted(_ITEM_BYTES)}, got {self.dtype!r}")

    @cached_property
    def layout_id(self) -> str:
        """The layout's part of the namespace, so that objects of different layouts never have equal keys."""
        shape = f"{self.layers}x{self.kv_heads}x{self.head_dim}x{self.block_tokens}:{self.dtype}"
        return f"packed1:{shape}:{self.packed_bytes}:{self.packing}" if self.packing else f"lktHD1:{shape}"

    @cached_property
    def token_bytes(self) -> int:
        """The bytes of one token in one layer's K (or V) plane."""
        return self.kv_heads * self.head_dim * _ITEM_BYTES[self.dtype]

    @cached_property
    def plane_bytes(self) -> int:
        """The bytes of one layer's K (or V) plane of one block."""
        return self.block_tokens * self.token_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """The bytes of one layer (K then V) of one block."""
        return self.packed_bytes or 2 * self.plane_bytes

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of one KV object."""
        return self.layers * self.layer_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The dimensions ``(layers, 2, block_tokens, kv_heads, head_dim)``."""
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim)

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks needed to hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def ranges(self, layer: int, first_token: int, end_token: int) -> list[tuple[int, int]]:
        """Returns ``(offset, length)`` byte ranges of tokens ``[first_token, end_token)`` of one block in one layer.

        A whole block is one range, a part of it is two (its K and its V)."""
        if not (0 <= layer < self.layers and 0 <= first_token < end_token <= self.block_tokens):
            raise ValueError(f"no such range: layer {layer}, tokens [{first_token}, {end_token})")
        base = layer * self.layer_bytes
        if end_token - first_token == self.block_tokens:
            return [(base, self.layer_bytes)]
        start = first_token * self.token_bytes
        length = (end_token - first_token) * self.token_bytes
        return [(base + start, length), (base + self.plane_bytes + start, length)]
