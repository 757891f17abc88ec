"""The shape of KV objects."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout


def layout_to_proto(layout: KvLayout) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
    )


def layout_from_proto(message: common_pb2.KvLayout, field: str = "layout") -> KvLayout:
    try:
        return KvLayout(message.layers, message.kv_heads, message.head_dim, message.block_tokens, message.dtype)
    except ValueError as error:
        raise InvalidArgument(str(error), field=field) from None
