"""Placement requests to the conductor, and its answers."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import Role
from pinyon.messages.checks import check_id, check_keys
from pinyon.messages.request_class import class_from_proto
from pinyon.placement.policy import PlacementDecision, PlacementRequest

EXCLUDED_MAX = 64
MS_MAX = (1 << 31) - 1


def request_from_proto(
    message: conductor_pb2.ScheduleRequest, request_id: str, ttft_slo_s: float, tbt_slo_s: float
) -> PlacementRequest:
    """Returns the checked request, under ``request_id``, with the conductor's SLOs (as given) where it has none."""
    check_id(request_id, "request_id")
    model = check_id(message.model, "model")
    prompt_tokens = message.prompt_tokens
    if prompt_tokens < 1:
        raise InvalidArgument("must be at least 1", field="prompt_tokens")
    exclude: frozenset[str] = frozenset()
    if message.exclude_instance_ids:
        if len(message.exclude_instance_ids) > EXCLUDED_MAX:
            raise InvalidArgument(f"must be at most {EXCLUDED_MAX} instances", field="exclude_instance_ids")
        exclude = frozenset(check_id(name, "exclude_instance_ids") for name in message.exclude_instance_ids)
    ttft_slo_ms = message.ttft_slo_ms
    tbt_slo_ms = message.tbt_slo_ms
    return PlacementRequest(
        request_id,
        model,
        prompt_tokens,
        check_keys(message.block_keys, "block_keys"),
        message.max_tokens,
        ttft_slo_ms / 1e3 if ttft_slo_ms else ttft_slo_s,
        tbt_slo_ms / 1e3 if tbt_slo_ms else tbt_slo_s,
        exclude,
        message.no_reuse,
        class_from_proto(message.request_class),
        bool(ttft_slo_ms),
    )


def fill_placement(
    message: common_pb2.Placement, decision: PlacementDecision, ttft_slo_s: float = 0.0, number: int = 0
) -> None:
    """Fills an existing message: a message that is copied into another one is serialized and parsed for that.

    ``ttft_slo_s`` is the SLO for which the request was placed (0: none), ``number`` that of its log entry (0: none)."""
    prefill, decode = decision.prefill.info, decision.decode.info
    message.prefill_instance_id = prefill.instance_id
    message.prefill_address = prefill.address
    message.decode_instance_id = decode.instance_id
    message.decode_address = decode.address
    for fetch in decision.fetches:
        source, span = fetch.source.info, message.fetches.add()
        span.source_id = source.instance_id
        span.source_address = source.address
        span.source = common_pb2.KV_SOURCE_STORE if source.role is Role.STORE else common_pb2.KV_SOURCE_PEER
        span.first_block = fetch.first_block
        span.block_count = fetch.block_count
    message.local_prefix_blocks = decision.local_blocks
    message.predicted_ttft_ms = decision.ttft_s * 1e3
    message.predicted_tbt_ms = decision.tbt_s * 1e3
    message.policy = decision.policy
    message.predicted_prefill_ms = min(MS_MAX, decision.prefill_s * 1e3)
    message.ttft_slo_ms = min(MS_MAX, round(ttft_slo_s * 1e3))
    message.number = number
