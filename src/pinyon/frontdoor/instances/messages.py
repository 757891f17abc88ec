"""The messages about a request to a conductor and to a worker."""

from __future__ import annotations

from collections.abc import Collection

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import tokens_to_bytes
from pinyon.frontdoor.instances.request import FIXED_BYTES, Request
from pinyon.messages.sampling import put_sampling

NO_SLO_MS = 1 << 31
MS_MAX = (1 << 31) - 1
KEYS_BYTES_MAX = 512 << 10
"""The maximum size of block keys in a message: with the longest prompt, more would not fit. Only the first are sent."""


def schedule_request(
    request: Request, exclude: Collection[str] = (), block_keys: bytes | None = None
) -> conductor_pb2.ScheduleRequest:
    """Returns the conductor's message. ``exclude`` is added to the failed instances; ``block_keys`` replaces the
    request's own keys if the conductor's instances have others.

    Each attempt has an id of its own, so that late reports about one do not end another.
    """
    return conductor_pb2.ScheduleRequest(
        request_id=request.attempt_id,
        model=request.model,
        request_class=request.class_message,
        prompt_tokens=request.prompt_tokens,
        block_keys=(request.block_keys if block_keys is None else block_keys)[:KEYS_BYTES_MAX],
        max_tokens=request.sampling.max_tokens,
        # The client of a request that failed elsewhere has waited already: late is better than rejected.
        ttft_slo_ms=NO_SLO_MS if request.tries else request.terms.ttft_slo_ms,
        tbt_slo_ms=NO_SLO_MS if request.tries else 0,
        exclude_instance_ids=sorted(request.failed_instances.union(exclude)),
        no_reuse=request.terms.no_reuse or (request.sampling.prompt_logprobs and not request.tokens),
        traceparent=request.traceparent,
    )


def schedule_bytes(request: Request, exclude: Collection[str] = ()) -> int:
    """Returns the most that :func:`schedule_request` takes in a message; ``exclude`` includes the failed instances."""
    names = sum([4 * len(name) + 4 for name in exclude]) if exclude else 0
    return min(KEYS_BYTES_MAX, len(request.block_keys)) + request.texts_bytes + names + FIXED_BYTES


def fill_submission(
    message: worker_pb2.Submission, request: Request, attempt_id: str, send_keys: bool, fingerprint: str, now_s: float
) -> None:
    """Writes the present attempt straight into a message that will be sent, as prompts are too large to copy.

    ``fingerprint`` names the weights that the instance should have, unless earlier tokens of the request decide that.
    """
    resumed = request.resumed
    if not request.tokens:
        request.fingerprint = fingerprint
    message.request_id = attempt_id
    message.model = request.model
    message.request_class.CopyFrom(request.class_message)
    if resumed:
        message.prompt_tokens_le32 = request.tokens_le32 + tokens_to_bytes(request.tokens[:resumed])
        message.generated_tokens = resumed
    else:
        message.prompt_tokens_le32 = request.tokens_le32
        if send_keys and len(request.block_keys) <= KEYS_BYTES_MAX:
            message.block_keys = request.block_keys
    put_sampling(message.sampling, request.sampling)
    slo_ms, placement = request.terms.ttft_slo_ms, request.placement
    if placement is not None:
        message.placement.CopyFrom(placement)
        slo_ms = placement.ttft_slo_ms
    if request.tokens:
        message.sampling.prompt_logprobs = False  # they came with the first token
    elif slo_ms:
        message.ttft_left_ms = max(-MS_MAX, slo_ms - round((now_s - request.arrived_s) * 1e3))
    message.timeout_ms = max(1, round((request.deadline_s - now_s) * 1e3))
    message.traceparent = request.traceparent
    message.no_reuse = request.terms.no_reuse
    message.model_fingerprint = request.fingerprint
