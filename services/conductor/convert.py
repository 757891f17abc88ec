"""Between messages and values. What comes from outside is checked here, field by field."""

from __future__ import annotations

import math

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.placement.instances import InstanceInfo, InstanceLoad, InstanceRole, InstanceState
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.runtime.settings import parse_address

__all__ = [
    "check_keys",
    "info_from_proto",
    "instance_to_proto",
    "load_from_proto",
    "placement_to_proto",
    "request_from_proto",
    "role_from_proto",
]

ID_CHARS_MAX = 128
EXCLUDED_MAX = 64

_PROTO_ROLES: dict[InstanceRole, common_pb2.Role] = {
    InstanceRole.PREFILL: common_pb2.ROLE_PREFILL,
    InstanceRole.DECODE: common_pb2.ROLE_DECODE,
    InstanceRole.MIXED: common_pb2.ROLE_MIXED,
    InstanceRole.STORE: common_pb2.ROLE_STORE,
}
_ROLES: dict[int, InstanceRole] = {number: role for role, number in _PROTO_ROLES.items()}


def _check_id(value: str, field: str) -> str:
    if not 0 < len(value) <= ID_CHARS_MAX:
        raise InvalidArgument(f"must have 1 to {ID_CHARS_MAX} characters, got {len(value)}", field=field)
    return value


def check_keys(packed: bytes, field: str) -> bytes:
    """Whole keys only. Raises :class:`InvalidArgument` naming ``field``."""
    if len(packed) % KEY_BYTES:
        raise InvalidArgument(f"must be a multiple of {KEY_BYTES} bytes, got {len(packed)}", field=field)
    return packed


def role_from_proto(role: int) -> InstanceRole | None:
    """None for unspecified. Raises :class:`InvalidArgument` for a number that is no role."""
    if role == common_pb2.ROLE_UNSPECIFIED:
        return None
    if role not in _ROLES:
        raise InvalidArgument(f"no such role: {role}", field="role")
    return _ROLES[role]


def request_from_proto(
    message: conductor_pb2.ScheduleRequest, request_id: str, ttft_slo_s: float, tbt_slo_s: float
) -> PlacementRequest:
    """The request, under ``request_id``, with the given SLOs where it names none. Raises :class:`InvalidArgument`."""
    _check_id(request_id, "request_id")
    model = _check_id(message.model, "model")
    if message.prompt_tokens < 1:
        raise InvalidArgument("must be at least 1", field="prompt_tokens")
    if len(message.tenant) > ID_CHARS_MAX:
        raise InvalidArgument(f"must have at most {ID_CHARS_MAX} characters", field="tenant")
    exclude: frozenset[str] = frozenset()
    if message.exclude_instance_ids:
        if len(message.exclude_instance_ids) > EXCLUDED_MAX:
            raise InvalidArgument(f"must be at most {EXCLUDED_MAX} instances", field="exclude_instance_ids")
        exclude = frozenset(_check_id(name, "exclude_instance_ids") for name in message.exclude_instance_ids)
    ttft_slo_ms = message.ttft_slo_ms
    tbt_slo_ms = message.tbt_slo_ms
    return PlacementRequest(
        request_id,
        model,
        message.prompt_tokens,
        check_keys(message.block_keys, "block_keys"),
        message.max_tokens,
        ttft_slo_ms / 1e3 if ttft_slo_ms else ttft_slo_s,
        tbt_slo_ms / 1e3 if tbt_slo_ms else tbt_slo_s,
        exclude,
        message.no_reuse,
    )


def placement_to_proto(decision: PlacementDecision) -> common_pb2.Placement:
    prefill, decode = decision.prefill.info, decision.decode.info
    message = common_pb2.Placement(
        prefill_instance_id=prefill.instance_id,
        prefill_address=prefill.address,
        decode_instance_id=decode.instance_id,
        decode_address=decode.address,
        local_prefix_blocks=decision.local_blocks,
        predicted_ttft_ms=decision.ttft_s * 1e3,
        predicted_tbt_ms=decision.tbt_s * 1e3,
        policy=decision.policy,
    )
    for span in decision.fetches:
        source = span.source.info
        message.fetches.add(
            source_id=source.instance_id,
            source_address=source.address,
            source=common_pb2.KV_SOURCE_STORE if source.role is InstanceRole.STORE else common_pb2.KV_SOURCE_PEER,
            first_block=span.first_block,
            block_count=span.block_count,
        )
    return message


def info_from_proto(message: conductor_pb2.InstanceInfo) -> InstanceInfo:
    """A registration. Raises :class:`InvalidArgument`."""
    role = role_from_proto(message.role)
    if role is None:
        raise InvalidArgument("must be given", field="registration.role")
    try:
        parse_address(message.address)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="registration.address") from None
    layout: KvLayout | None = None
    model = fingerprint = ""
    if role is not InstanceRole.STORE:
        model = _check_id(message.model, "registration.model")
        fingerprint = _check_id(message.model_fingerprint, "registration.model_fingerprint")
        if not message.HasField("layout"):
            raise InvalidArgument("must be given", field="registration.layout")
        shape = message.layout
        try:
            layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, shape.block_tokens, shape.dtype)
        except ValueError as error:
            raise InvalidArgument(str(error), field="registration.layout") from None
    if len(message.region) > ID_CHARS_MAX:
        raise InvalidArgument(f"must have at most {ID_CHARS_MAX} characters", field="registration.region")
    return InstanceInfo(
        instance_id=_check_id(message.instance_id, "registration.instance_id"),
        boot_id=_check_id(message.boot_id, "registration.boot_id"),
        role=role,
        address=message.address,
        model=model,
        model_fingerprint=fingerprint,
        layout=layout,
        capacity_blocks=message.capacity_blocks,
        max_batch=message.max_batch,
        max_context_tokens=message.max_context_tokens,
        region=message.region,
    )


def load_from_proto(message: conductor_pb2.InstanceLoad) -> InstanceLoad:
    """A load report. Raises :class:`InvalidArgument`."""
    if not 0 <= message.mean_tbt_ms < math.inf:
        raise InvalidArgument("must be a non-negative number", field="load.mean_tbt_ms")
    return InstanceLoad(
        pending_requests=message.pending_requests,
        running_requests=message.running_requests,
        pending_prefill_tokens=message.pending_prefill_tokens,
        used_blocks=message.used_blocks,
        cached_blocks=message.cached_blocks,
        mean_tbt_ms=message.mean_tbt_ms,
        draining=message.draining,
    )


def instance_to_proto(state: InstanceState, indexed_blocks: int, report_age_s: float) -> conductor_pb2.Instance:
    info, load = state.info, state.load
    message = conductor_pb2.Instance(
        info=conductor_pb2.InstanceInfo(
            instance_id=info.instance_id,
            boot_id=info.boot_id,
            role=_PROTO_ROLES[info.role],
            address=info.address,
            model=info.model,
            model_fingerprint=info.model_fingerprint,
            capacity_blocks=info.capacity_blocks,
            max_batch=info.max_batch,
            max_context_tokens=info.max_context_tokens,
            region=info.region,
        ),
        load=conductor_pb2.InstanceLoad(
            pending_requests=load.pending_requests,
            running_requests=load.running_requests,
            pending_prefill_tokens=load.pending_prefill_tokens,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
            mean_tbt_ms=load.mean_tbt_ms,
            draining=load.draining,
        ),
        indexed_blocks=indexed_blocks,
        report_age_ms=max(0, round(report_age_s * 1e3)),
        schedulable=state.schedulable,
    )
    if info.layout is not None:
        layout = info.layout
        message.info.layout.CopyFrom(
            common_pb2.KvLayout(
                layers=layout.layers,
                kv_heads=layout.kv_heads,
                head_dim=layout.head_dim,
                block_tokens=layout.block_tokens,
                dtype=layout.dtype,
            )
        )
    return message
