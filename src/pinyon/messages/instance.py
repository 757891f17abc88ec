"""Messages about instances: their own registrations and load reports, and the conductor's list."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import KEY_BYTES, SHARED_PREFIXES_MAX, SharedPrefix
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.messages.checks import ADDRESS_CHARS_MAX, check_address, check_id, check_text
from pinyon.messages.enums import role_from_proto, role_to_proto
from pinyon.placement.instances import InstanceInfo, InstanceLoad, InstanceState

FAILED_SOURCES_MAX = 64
LOAD_MS_MAX = 3.6e6
"""The maximum of a reported duration; a longer one comes from a broken clock."""
BATCH_MAX = 1 << 32
KV_TOKENS_MAX = 1 << 48
"""The maximum number of KV tokens, more than any memory can hold."""
LEVEL_BLOCKS_MAX = 4096
PREFIX_BLOCKS_MAX = 1 << 24
NO_SOURCES: frozenset[str] = frozenset()
_RANGES = (
    ("mean_tbt_ms", LOAD_MS_MAX),
    ("room_wait_ms", LOAD_MS_MAX),
    ("mean_batch", BATCH_MAX),
    ("mean_kv_tokens", KV_TOKENS_MAX),
    ("kv_tokens", KV_TOKENS_MAX),
    ("prefix_level_blocks", LEVEL_BLOCKS_MAX),
)
_INFO = (
    *("instance_id", "boot_id", "address", "model", "model_fingerprint", "capacity_blocks", "max_batch"),
    *("max_context_tokens", "key_secret_id", "short_first", "server_url", "keeps_to_itself", "zone"),
)
_LOAD = (
    *("pending_requests", "running_requests", "pending_prefill_tokens", "used_blocks", "cached_blocks", "mean_tbt_ms"),
    *("mean_batch", "mean_kv_tokens", "kv_tokens", "room_wait_ms", "draining", "waiting_for_room", "room"),
)
"""Fields with the same name in message and value, like those of ``_INFO``."""
_load_values: Callable[[InstanceLoad], tuple[Any, ...]] = attrgetter(*_LOAD)


def info_to_proto(info: InstanceInfo) -> conductor_pb2.InstanceInfo:
    return conductor_pb2.InstanceInfo(
        role=role_to_proto(info.role),
        layout=None if info.layout is None else layout_to_proto(info.layout),
        **{name: getattr(info, name) for name in _INFO},
    )


def info_from_proto(message: conductor_pb2.InstanceInfo) -> InstanceInfo:
    """Returns a checked registration."""
    role = role_from_proto(message.role)
    if role is None:
        raise InvalidArgument("must be given", field="registration.role")
    check_address(message.address, "registration.address")
    said: dict[str, Any] = {name: getattr(message, name) for name in _INFO}
    needed = ["instance_id", "boot_id"]
    layout: KvLayout | None = None
    if role is Role.STORE:
        said["model"] = said["model_fingerprint"] = ""
    else:
        needed += ["model", "model_fingerprint"]
        if not message.HasField("layout"):
            raise InvalidArgument("must be given", field="registration.layout")
        layout = layout_from_proto(message.layout, "registration.layout")
    for name in needed:
        check_id(said[name], f"registration.{name}")
    check_text(message.key_secret_id, "registration.key_secret_id")
    check_text(message.server_url, "registration.server_url", ADDRESS_CHARS_MAX)
    check_text(message.zone, "registration.zone")
    return InstanceInfo(role=role, layout=layout, **said)


def load_to_proto(load: InstanceLoad) -> conductor_pb2.InstanceLoad:
    return conductor_pb2.InstanceLoad(
        failed_source_addresses=sorted(load.failed_sources),
        prefix_level_blocks=load.level_blocks,
        shared_prefixes=[
            conductor_pb2.SharedPrefix(block_key=each.key, blocks=each.blocks, requests=each.requests)
            for each in load.shared
        ],
        **dict(zip(_LOAD, _load_values(load), strict=True)),
    )


def load_from_proto(message: conductor_pb2.InstanceLoad) -> InstanceLoad:
    """Returns a checked load report."""
    kv_tokens, mean_kv_tokens, mean_batch = message.kv_tokens, message.mean_kv_tokens, message.mean_batch
    tbt_ms, room_ms, level_blocks = message.mean_tbt_ms, message.room_wait_ms, message.prefix_level_blocks
    if not (
        0 <= tbt_ms <= LOAD_MS_MAX
        and 0 <= room_ms <= LOAD_MS_MAX
        and 0 <= mean_batch <= BATCH_MAX
        and 0 <= mean_kv_tokens <= KV_TOKENS_MAX
        and kv_tokens <= KV_TOKENS_MAX
        and level_blocks <= LEVEL_BLOCKS_MAX
    ):
        raise _out_of_range(message)
    if len(message.failed_source_addresses) > FAILED_SOURCES_MAX:
        raise InvalidArgument(f"must be at most {FAILED_SOURCES_MAX} addresses", field="load.failed_source_addresses")
    # positional arguments, for speed: each report comes through here
    return InstanceLoad(
        message.pending_requests,
        message.running_requests,
        message.pending_prefill_tokens,
        message.used_blocks,
        message.cached_blocks,
        tbt_ms,
        mean_batch,
        mean_kv_tokens,
        kv_tokens,
        room_ms,
        message.draining,
        _failed_from_proto(message) if message.failed_source_addresses else NO_SOURCES,
        level_blocks,
        _shared_from_proto(message) if message.shared_prefixes else (),
        message.waiting_for_room,
        message.room,
    )


def _out_of_range(message: conductor_pb2.InstanceLoad) -> InvalidArgument:
    field, most = next(each for each in _RANGES if not 0 <= getattr(message, each[0]) <= each[1])
    return InvalidArgument(f"must be from 0 to {most:g}", field=f"load.{field}")


def _failed_from_proto(message: conductor_pb2.InstanceLoad) -> frozenset[str]:
    return frozenset(
        check_text(each, "load.failed_source_addresses", ADDRESS_CHARS_MAX) for each in message.failed_source_addresses
    )


def _shared_from_proto(message: conductor_pb2.InstanceLoad) -> tuple[SharedPrefix, ...]:
    if len(message.shared_prefixes) > (SHARED_PREFIXES_MAX if message.prefix_level_blocks else 0):
        raise InvalidArgument(
            f"must be at most {SHARED_PREFIXES_MAX}, and none without prefix_level_blocks", field="load.shared_prefixes"
        )
    if len({each.block_key for each in message.shared_prefixes}) < len(message.shared_prefixes):
        raise InvalidArgument("must be different ones", field="load.shared_prefixes.block_key")
    for each in message.shared_prefixes:
        if each.requests < 2:
            raise InvalidArgument("must be at least 2", field="load.shared_prefixes.requests")
        if len(each.block_key) != KEY_BYTES:
            raise InvalidArgument(f"must have {KEY_BYTES} bytes", field="load.shared_prefixes.block_key")
        if not 1 <= each.blocks <= PREFIX_BLOCKS_MAX:
            raise InvalidArgument(f"must be from 1 to {PREFIX_BLOCKS_MAX}", field="load.shared_prefixes.blocks")
    return tuple(SharedPrefix(each.block_key, each.blocks, each.requests) for each in message.shared_prefixes)


def instance_to_proto(state: InstanceState, indexed_blocks: int, report_age_s: float) -> conductor_pb2.Instance:
    return conductor_pb2.Instance(
        info=info_to_proto(state.info),
        load=load_to_proto(state.load),
        indexed_blocks=indexed_blocks,
        report_age_ms=max(0, round(report_age_s * 1e3)),
        schedulable=state.schedulable,
    )


_LAYOUT = ("layers", "kv_heads", "head_dim", "block_tokens", "dtype", "packing", "packed_bytes")
shape_of: Callable[[KvLayout | common_pb2.KvLayout], tuple[Any, ...]] = attrgetter(*_LAYOUT)
"""Returns the shape of a message or a value."""


def layout_to_proto(layout: KvLayout) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(**dict(zip(_LAYOUT, shape_of(layout), strict=True)))


def layout_from_proto(message: common_pb2.KvLayout, field: str = "layout") -> KvLayout:
    try:
        return KvLayout(*shape_of(message))
    except ValueError as error:
        raise InvalidArgument(str(error), field=field) from None
