"""What the conductor is asked, and what it answers."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.fetch_span import FetchSpan, KvSource
from pinyon.core.request import Role
from pinyon.messages.checks import check_id, check_keys
from pinyon.messages.fetch_span import fetch_span_to_proto
from pinyon.messages.request_class import class_from_proto
from pinyon.placement.policy import Fetch, PlacementDecision, PlacementRequest

__all__ = ["placement_to_proto", "request_from_proto"]

EXCLUDED_MAX = 64
MS_MAX = (1 << 31) - 1


def request_from_proto(
    message: conductor_pb2.ScheduleRequest, request_id: str, ttft_slo_s: float, tbt_slo_s: float
) -> PlacementRequest:
    """The request, under ``request_id``, with the given SLOs, the conductor's, where it names none."""
    check_id(request_id, "request_id")
    model = check_id(message.model, "model")
    if message.prompt_tokens < 1:
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
        message.prompt_tokens,
        check_keys(message.block_keys, "block_keys"),
        message.max_tokens,
        ttft_slo_ms / 1e3 if ttft_slo_ms else ttft_slo_s,
        tbt_slo_ms / 1e3 if tbt_slo_ms else tbt_slo_s,
        exclude,
        message.no_reuse,
        class_from_proto(message.request_class),
        bool(ttft_slo_ms),
    )


def placement_to_proto(decision: PlacementDecision, ttft_slo_s: float = 0.0, number: int = 0) -> common_pb2.Placement:
    """``ttft_slo_s``: what the request was placed for; 0: nothing. ``number``: by which it is logged; 0: it is not."""
    prefill, decode = decision.prefill.info, decision.decode.info
    return common_pb2.Placement(
        prefill_instance_id=prefill.instance_id,
        prefill_address=prefill.address,
        decode_instance_id=decode.instance_id,
        decode_address=decode.address,
        fetches=[fetch_span_to_proto(_span(fetch)) for fetch in decision.fetches],
        local_prefix_blocks=decision.local_blocks,
        predicted_ttft_ms=decision.ttft_s * 1e3,
        predicted_tbt_ms=decision.tbt_s * 1e3,
        policy=decision.policy,
        predicted_prefill_ms=min(MS_MAX, decision.prefill_s * 1e3),
        ttft_slo_ms=min(MS_MAX, round(ttft_slo_s * 1e3)),
        number=number,
    )


def _span(fetch: Fetch) -> FetchSpan:
    source = fetch.source.info
    kind = KvSource.STORE if source.role is Role.STORE else KvSource.PEER
    return FetchSpan(source.instance_id, source.address, kind, fetch.first_block, fetch.first_block + fetch.block_count)
