"""The shape of KV objects as a message."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout

_NAMES = ("layers", "kv_heads", "head_dim", "block_tokens", "dtype")
shape_of: Callable[[KvLayout | common_pb2.KvLayout], tuple[Any, ...]] = attrgetter(*_NAMES)
"""Returns the shape of a message or a value."""


def layout_to_proto(layout: KvLayout) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(**dict(zip(_NAMES, shape_of(layout), strict=True)))


def layout_from_proto(message: common_pb2.KvLayout, field: str = "layout") -> KvLayout:
    try:
        return KvLayout(*shape_of(message))
    except ValueError as error:
        raise InvalidArgument(str(error), field=field) from None
