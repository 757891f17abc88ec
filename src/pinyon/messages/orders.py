"""Requests to a worker from load balancers and other workers, and its answers. The requests are checked here.

Wrong input raises :class:`InvalidArgument` (or :class:`NotFound` for an unknown model) that names the proto field."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import KEY_BYTES, BlockKey, chain_block_keys, pack_keys, tokens_to_bytes, unpack_keys
from pinyon.core.errors import FailedPrecondition, Internal, InvalidArgument, NotFound, PinyonError
from pinyon.core.logprobs import PROMPT_LOGPROBS_MAX, TokenLogprob
from pinyon.core.orders import (
    FETCH_SPANS_MAX,
    FetchSpan,
    GenerateOrder,
    KvSource,
    PrefillOrder,
    PrefillReport,
    Tokens,
    tokens_of,
)
from pinyon.core.request import SamplingParams
from pinyon.core.served import Served
from pinyon.messages.checks import ADDRESS_CHARS_MAX, check_text
from pinyon.messages.enums import numbered
from pinyon.messages.instance import layout_to_proto, shape_of
from pinyon.messages.logprobs import SentLogprobs, check_logprobs, logprobs_from_proto
from pinyon.messages.prefill_report import report_from_proto
from pinyon.messages.request_class import class_from_proto, class_to_proto
from pinyon.messages.sampling import sampling_from_proto, sampling_to_proto
from pinyon.messages.segment import region_from_proto, segment_from_proto, segment_to_proto
from pinyon.transfer import SegmentDescriptor

_NEUTRAL = SamplingParams()
MS_MAX = (1 << 31) - 1
_SOURCE_NUMBERS, _SOURCES = numbered(KvSource, common_pb2, "KV_SOURCE")


@dataclass(frozen=True, slots=True)
class PushTarget:
    """The target of a prompt's KV: byte offsets in the remote region of the blocks from ``first_block`` on."""

    segment: SegmentDescriptor
    region_key: bytes
    first_block: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The result of a prefill, computed here or elsewhere."""

    token: int
    report: PrefillReport
    logprob: TokenLogprob | None
    """The log-probability of the first token, if the order asks for it."""
    prompt_logprobs: SentLogprobs | None
    """Log-probabilities of the prompt's tokens from the second one on, kept as a message: there may be many."""


# -- requests of a load balancer


def parse_submission(message: worker_pb2.Submission, served: Served, default_timeout_s: float) -> GenerateOrder:
    """Returns the checked order of a load balancer.

    Raises :class:`InvalidArgument` and :class:`NotFound` as the module says. Raises :class:`FailedPrecondition` if this
    instance's role does not allow it, the placement names another instance, or the tokens generated so far came from
    other weights."""
    if not served.role.decodes:
        raise FailedPrecondition(f"{served.instance_id} is a prefill instance: it generates nothing", field="placement")
    if message.model and message.model != served.name:
        raise NotFound(f"model {message.model!r} is not served here", field="model")
    if message.model_fingerprint and message.model_fingerprint != served.fingerprint:
        raise FailedPrecondition(
            f"{served.instance_id} serves other weights than those it began with", field="model_fingerprint"
        )
    placement = message.placement
    if message.HasField("placement") and placement.decode_instance_id != served.instance_id:
        raise FailedPrecondition(
            f"placed on {placement.decode_instance_id!r}, but this is {served.instance_id!r}", field="placement"
        )
    prompt = _prompt(message, placement, served)
    generated, most = prompt.sample_index, prompt.sampling.max_tokens
    if generated >= most:
        raise InvalidArgument(f"max_tokens {most} are generated already ({generated})", field="generated_tokens")
    total = len(prompt.tokens) - generated + most
    if total > served.max_context:
        raise InvalidArgument(
            f"prompt and max_tokens together need {total} tokens, over the context of {served.max_context}",
            field="max_tokens",
        )
    prefill_id = prefill_address = ""
    if message.HasField("placement") and placement.prefill_instance_id != served.instance_id:
        prefill_id, prefill_address = placement.prefill_instance_id, placement.prefill_address
        if not prefill_id or not prefill_address:
            raise InvalidArgument("the placement names no prefill instance", field="placement")
        check_text(prefill_id, "placement")
        check_text(prefill_address, "placement", ADDRESS_CHARS_MAX)
    if not prefill_id and not served.role.prefills:
        raise FailedPrecondition(
            f"{served.instance_id} is a decode instance: a placement must name who computes the prompt",
            field="placement",
        )
    timeout_s = message.timeout_ms / 1000 if message.timeout_ms else default_timeout_s
    return GenerateOrder(prompt, prefill_id, prefill_address, timeout_s, placement.number)


# -- requests of a decode instance to a prefill instance


def hello_to_proto(served: Served, segment: SegmentDescriptor) -> worker_pb2.PrefillHello:
    """Returns the greeting to a prefill instance; ``segment`` says how to reach the decode instance's memory."""
    return worker_pb2.PrefillHello(
        instance_id=served.instance_id,
        segment=segment_to_proto(segment),
        layout=layout_to_proto(served.layout),
        model_fingerprint=served.fingerprint,
    )


def parse_hello(message: worker_pb2.PrefillHello, served: Served) -> SegmentDescriptor:
    """Returns how to reach the decode instance's memory.

    Raises :class:`InvalidArgument`, or :class:`FailedPrecondition` for another model or KV layout."""
    check_text(message.instance_id, "hello.instance_id")
    if (shape := shape_of(message.layout)) != shape_of(served.layout):
        raise FailedPrecondition(f"KV layout {shape} is not ours ({served.layout.layout_id})", field="hello.layout")
    if message.model_fingerprint != served.fingerprint:
        raise FailedPrecondition("the instances serve different weights", field="hello.model_fingerprint")
    try:
        return segment_from_proto(message.segment)
    except PinyonError as error:  # compiled, ``InvalidArgument as`` rejects the transfer engine's subclasses
        raise InvalidArgument(error.message, field="hello.segment") from error


def prefill_to_proto(
    order: PrefillOrder, first_block: int, offsets: Iterable[int], timeout_s: float, waited_s: float, traceparent: str
) -> worker_pb2.PrefillStart:
    """Returns a request for the prompt's KV at byte ``offsets`` of the target region, one per block.

    The offsets are those of the blocks from ``first_block`` on; ``waited_s`` is the time since the order arrived."""
    left_s = order.ttft_left_s - waited_s
    return worker_pb2.PrefillStart(
        request_id=order.request_id,
        request_class=class_to_proto(order.request_class),
        prompt_tokens_le32=tokens_to_bytes(order.tokens),
        block_keys=pack_keys(order.keys),
        sampling=sampling_to_proto(order.sampling),
        generated_tokens=order.sample_index,
        fetches=[fetch_span_to_proto(span) for span in order.fetches],
        target_offsets_bytes=offsets,
        first_target_block=first_block,
        timeout_ms=max(1, round(1000 * timeout_s)),
        traceparent=traceparent,
        no_reuse=order.no_reuse,
        ttft_left_ms=None if left_s == math.inf else max(-MS_MAX, round(left_s * 1e3)),
        predicted_prefill_ms=min(MS_MAX, order.prefill_s * 1e3),
        ask_store=order.ask_store,
    )


def parse_prefill(message: worker_pb2.PrefillStart, served: Served) -> PrefillOrder:
    """Returns the checked order. Raises :class:`InvalidArgument`."""
    order = _prompt(message, message, served)
    if len(order.tokens) > served.max_context:
        raise InvalidArgument(
            f"a prompt of {len(order.tokens)} tokens is over the context of {served.max_context}",
            field="prompt_tokens_le32",
        )
    return order


def parse_target(message: worker_pb2.PrefillStart, segment: SegmentDescriptor, served: Served) -> PushTarget:
    """Returns where the prompt's KV goes: offsets in its target region. Raises :class:`InvalidArgument`."""
    layout = served.layout
    blocks = layout.blocks_for(len(message.prompt_tokens_le32) // 4)
    first, offsets = message.first_target_block, tuple(message.target_offsets_bytes)
    if first > blocks or len(offsets) != blocks - first:
        raise InvalidArgument(
            f"{blocks} blocks of the prompt from {first} on need as many offsets, got {len(offsets)}",
            field="target_offsets_bytes",
        )
    if not offsets:
        return PushTarget(segment, b"", first, ())
    try:
        region = region_from_proto(message.target_region)
    except PinyonError as error:  # caught as PinyonError for the reason in parse_hello
        raise InvalidArgument(error.message, field="target_region") from error
    if max(offsets) + layout.block_bytes > region.length:
        raise InvalidArgument("a target lies outside the region", field="target_offsets_bytes")
    return PushTarget(replace(segment, regions=(region,)), region.key, first, offsets)


# -- results of a prefill


def parse_first_token(message: worker_pb2.PrefillResult, order: PrefillOrder, served: Served) -> FirstToken:
    """Returns a prefill instance's result for the order. Raises :class:`Internal` if it does not fit the order."""
    if not 0 <= message.first_token < served.vocab_size:
        raise Internal("the prefill instance sent no token of the vocabulary")
    logprob, prompt_logprobs = None, None
    try:
        if order.sampling.logprobs >= 0:
            check_logprobs(message.logprobs, 1)
            (logprob,) = logprobs_from_proto(message.logprobs)
        if order.tells_prompt:
            check_logprobs(message.prompt_logprobs, len(order.tokens) - 1)
            prompt_logprobs = SentLogprobs(message.prompt_logprobs)
    except InvalidArgument as error:
        raise Internal(f"the prefill instance's log-probabilities are wrong: {error.message}") from error
    return FirstToken(message.first_token, report_from_proto(message.report), logprob, prompt_logprobs)


# -- parts of several messages


def _prompt(
    message: worker_pb2.Submission | worker_pb2.PrefillStart,
    plan: common_pb2.Placement | worker_pb2.PrefillStart,
    served: Served,
) -> PrefillOrder:
    """Returns the checked prompt; ``plan`` says what to fetch. A load balancer may leave out the block keys."""
    check_text(message.request_id, "request_id")
    request_class = class_from_proto(message.request_class)
    tokens, generated = _tokens(message.prompt_tokens_le32, served), message.generated_tokens
    sampling = _sampling(message.sampling, len(tokens) - generated, served)
    if generated >= len(tokens):
        raise InvalidArgument(
            f"{generated} generated tokens leave nothing of a prompt of {len(tokens)}", field="generated_tokens"
        )
    keys = _keys(message.block_keys, len(tokens), served)
    if not message.block_keys and plan is not message:
        start = served.namespace(request_class.tenant, request_class.cache_salt)
        keys = chain_block_keys(start, message.prompt_tokens_le32, served.layout.block_tokens)
    prefill_ms = plan.predicted_prefill_ms
    if not 0 <= prefill_ms <= MS_MAX:  # also rejects NaN
        field = "predicted_prefill_ms" if plan is message else "placement.predicted_prefill_ms"
        raise InvalidArgument(f"must be milliseconds from 0 to {MS_MAX}", field=field)
    return PrefillOrder(
        request_id=message.request_id,
        request_class=request_class,
        tokens=tokens,
        keys=keys,
        sampling=sampling,
        sample_index=generated,
        fetches=fetch_spans_from_proto(plan.fetches, len(keys)),
        no_reuse=message.no_reuse,
        traceparent=message.traceparent,
        prefill_s=prefill_ms / 1e3,
        ttft_left_s=message.ttft_left_ms / 1e3 if message.HasField("ttft_left_ms") else math.inf,
        ask_store=plan.ask_store,
    )


def _tokens(raw: bytes, served: Served) -> Tokens:
    if not raw:
        raise InvalidArgument("the prompt is empty", field="prompt_tokens_le32")
    if len(raw) % 4:
        raise InvalidArgument(f"{len(raw)} bytes are no u32 tokens", field="prompt_tokens_le32")
    tokens = tokens_of(raw)
    highest = int(tokens.max())
    if highest >= served.vocab_size:
        raise InvalidArgument(
            f"token id {highest} is outside the vocabulary of {served.vocab_size}", field="prompt_tokens_le32"
        )
    return tokens


def _sampling(message: common_pb2.SamplingParams, prompt_tokens: int, served: Served) -> SamplingParams:
    sampling = sampling_from_proto(message)
    for name in sorted(served.unsupported):
        if getattr(sampling, name) != getattr(_NEUTRAL, name):
            raise InvalidArgument(f"{name} is not supported by this engine: leave it out", field=name)
    sampling.check_tokens(served.vocab_size)
    count = (sampling.logprobs + 1) * prompt_tokens
    if sampling.prompt_logprobs and count > PROMPT_LOGPROBS_MAX:
        raise InvalidArgument(
            f"prompt_logprobs of {prompt_tokens} tokens with {sampling.logprobs} likeliest ones each are {count}, more "
            f"than {PROMPT_LOGPROBS_MAX}: ask for fewer logprobs or send a shorter prompt",
            field="prompt_logprobs",
        )
    return sampling


def _keys(packed: bytes, tokens: int, served: Served) -> list[BlockKey]:
    if packed and len(packed) != KEY_BYTES * (tokens // served.layout.block_tokens):
        raise InvalidArgument(
            f"{tokens} tokens have {tokens // served.layout.block_tokens} block keys of {KEY_BYTES} bytes, "
            f"got {len(packed)} bytes",
            field="block_keys",
        )
    return unpack_keys(packed)


def fetch_span_to_proto(span: FetchSpan) -> common_pb2.FetchSpan:
    return common_pb2.FetchSpan(
        source_id=span.source_id,
        source_address=span.address,
        source=_SOURCE_NUMBERS[span.source],
        first_block=span.first,
        block_count=span.end - span.first,
    )


def fetch_spans_from_proto(messages: Iterable[common_pb2.FetchSpan], blocks: int) -> tuple[FetchSpan, ...]:
    """Returns spans in block order within a prompt of ``blocks`` blocks. An unspecified source counts as a peer."""
    spans: list[FetchSpan] = []
    end = 0
    for message in messages:
        if len(spans) >= FETCH_SPANS_MAX:
            raise InvalidArgument(f"more than {FETCH_SPANS_MAX} spans to fetch", field="fetches")
        first = message.first_block
        if first < end or not message.block_count or first + message.block_count > blocks:
            raise InvalidArgument("spans to fetch must be in block order and inside the prompt", field="fetches")
        end = first + message.block_count
        check_text(message.source_address, "fetches", ADDRESS_CHARS_MAX)
        source = _SOURCES.get(message.source, KvSource.PEER)
        spans.append(FetchSpan(message.source_id, message.source_address, source, first, end))
    return tuple(spans)
