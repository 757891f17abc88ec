"""From proto to values: what others ask of this worker, checked. Everything here meets outside data.

A wrong input raises :class:`InvalidArgument` (or :class:`NotFound` for an unknown model) that names the proto field.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import KEY_BYTES, BlockKey, chain_block_keys, unpack_keys
from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound
from pinyon.core.request import SamplingParams
from pinyon.store.segments import segment_from_proto
from pinyon.transfer import SegmentDescriptor
from services.worker.served import Served

__all__ = [
    "FetchSpan",
    "GenerateOrder",
    "PrefillOrder",
    "PushTarget",
    "parse_hello",
    "parse_prefill",
    "parse_submission",
    "parse_target",
]

MAX_ID_CHARS = 128
MAX_TENANT_CHARS = 128
MAX_FETCH_SPANS = 64

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """Blocks ``[first, end)`` of the prompt to be read from one source."""

    source_id: str
    address: str
    source: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """A prompt to compute. ``keys`` are those of its full blocks."""

    request_id: str
    tokens: Tokens
    keys: list[BlockKey]
    sampling: SamplingParams
    sample_index: int
    fetches: tuple[FetchSpan, ...]
    no_reuse: bool
    traceparent: str


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where a prompt's KV goes: byte offset in the remote region of each block from ``first_block`` on."""

    segment: SegmentDescriptor
    region_key: bytes
    first_block: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateOrder:
    """A request to own. ``tokens`` include the ``generated`` ones of a resumed request."""

    request_id: str
    tenant: str
    tokens: Tokens
    keys: list[BlockKey]
    sampling: SamplingParams
    generated: int
    prefill_instance_id: str
    """Empty: this instance computes the prompt itself."""
    prefill_address: str
    fetches: tuple[FetchSpan, ...]
    timeout_s: float
    traceparent: str
    no_reuse: bool

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_tokens - self.generated


def parse_submission(message: worker_pb2.Submission, served: Served, default_timeout_s: float) -> GenerateOrder:
    """
    Raises:
        InvalidArgument, NotFound: see the module.
        FailedPrecondition: this instance's role does not allow it, or the placement names another instance.
    """
    if not served.role.decodes:
        raise FailedPrecondition(f"{served.instance_id} is a prefill instance: it generates nothing", field="placement")
    _check_text(message.request_id, MAX_ID_CHARS, "request_id")
    _check_text(message.request_class.tenant, MAX_TENANT_CHARS, "request_class.tenant")
    if message.model and message.model != served.name:
        raise NotFound(f"model {message.model!r} is not served here", field="model")
    tokens = _tokens(message.prompt_tokens_le32, served)
    sampling = _sampling(message.sampling)
    generated = message.generated_tokens
    if generated >= len(tokens):
        raise InvalidArgument(
            f"{generated} generated tokens leave nothing of a prompt of {len(tokens)}", field="generated_tokens"
        )
    if generated >= sampling.max_tokens:
        raise InvalidArgument(
            f"max_tokens {sampling.max_tokens} are generated already ({generated})", field="generated_tokens"
        )
    total = len(tokens) - generated + sampling.max_tokens
    if total > served.max_context:
        raise InvalidArgument(
            f"prompt and max_tokens together need {total} tokens, over the context of {served.max_context}",
            field="max_tokens",
        )
    keys = _keys(message.block_keys, len(tokens), served)
    if not message.block_keys:
        keys = chain_block_keys(
            served.namespace(message.request_class.tenant), message.prompt_tokens_le32, served.layout.block_tokens
        )
    prefill_id = prefill_address = ""
    fetches: tuple[FetchSpan, ...] = ()
    if message.HasField("placement"):
        placement = message.placement
        if placement.decode_instance_id != served.instance_id:
            raise FailedPrecondition(
                f"placed on {placement.decode_instance_id!r}, but this is {served.instance_id!r}", field="placement"
            )
        fetches = _fetches(placement.fetches, len(keys))
        if placement.prefill_instance_id != served.instance_id:
            prefill_id, prefill_address = placement.prefill_instance_id, placement.prefill_address
            if not prefill_id or not prefill_address:
                raise InvalidArgument("the placement names no prefill instance", field="placement")
    if not prefill_id and not served.role.prefills:
        raise FailedPrecondition(
            f"{served.instance_id} is a decode instance: a placement must name who computes the prompt",
            field="placement",
        )
    return GenerateOrder(
        request_id=message.request_id,
        tenant=message.request_class.tenant,
        tokens=tokens,
        keys=keys,
        sampling=sampling,
        generated=generated,
        prefill_instance_id=prefill_id,
        prefill_address=prefill_address,
        fetches=fetches,
        timeout_s=message.timeout_ms / 1000 if message.timeout_ms else default_timeout_s,
        traceparent=message.traceparent,
        no_reuse=message.no_reuse,
    )


def parse_prefill(message: worker_pb2.PrefillStart, served: Served) -> PrefillOrder:
    """
    Raises:
        InvalidArgument
    """
    _check_text(message.request_id, MAX_ID_CHARS, "request_id")
    tokens = _tokens(message.prompt_tokens_le32, served)
    if len(tokens) > served.max_context:
        raise InvalidArgument(
            f"a prompt of {len(tokens)} tokens is over the context of {served.max_context}", field="prompt_tokens_le32"
        )
    keys = _keys(message.block_keys, len(tokens), served)
    return PrefillOrder(
        request_id=message.request_id,
        tokens=tokens,
        keys=keys,
        sampling=_sampling(message.sampling),
        sample_index=message.generated_tokens,
        fetches=_fetches(message.fetches, len(keys)),
        no_reuse=message.no_reuse,
        traceparent=message.traceparent,
    )


def parse_target(message: worker_pb2.PrefillStart, segment: SegmentDescriptor, served: Served) -> PushTarget:
    """Where the KV of ``message``'s prompt goes, inside ``segment.regions[0]``.

    Raises:
        InvalidArgument
    """
    layout, region = served.layout, segment.regions[0]
    blocks = layout.blocks_for(len(message.prompt_tokens_le32) // 4)
    first, offsets = message.first_target_block, tuple(message.target_offsets_bytes)
    if first > blocks or len(offsets) != blocks - first:
        raise InvalidArgument(
            f"{blocks} blocks of the prompt from {first} on need as many offsets, got {len(offsets)}",
            field="target_offsets_bytes",
        )
    if offsets and max(offsets) + layout.block_bytes > region.length:
        raise InvalidArgument("a target lies outside the region", field="target_offsets_bytes")
    return PushTarget(segment, region.key, first, offsets)


def parse_hello(message: worker_pb2.PrefillHello, served: Served) -> SegmentDescriptor:
    """The decode instance's memory.

    Raises:
        InvalidArgument
        FailedPrecondition: another model or KV layout.
    """
    _check_text(message.instance_id, MAX_ID_CHARS, "hello.instance_id")
    theirs, ours = message.layout, served.layout
    shape = (theirs.layers, theirs.kv_heads, theirs.head_dim, theirs.block_tokens, theirs.dtype)
    if shape != (ours.layers, ours.kv_heads, ours.head_dim, ours.block_tokens, ours.dtype):
        raise FailedPrecondition(f"KV layout {shape} is not ours ({ours.layout_id})", field="hello.layout")
    if message.model_fingerprint != served.card.fingerprint:
        raise FailedPrecondition("the instances serve different weights", field="hello.model_fingerprint")
    try:
        segment = segment_from_proto(message.segment)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="hello.segment") from error
    if not segment.regions:
        raise InvalidArgument("the segment has no region", field="hello.segment")
    return segment


def _check_text(text: str, limit: int, field: str) -> None:
    if len(text) > limit:
        raise InvalidArgument(f"{field} is longer than {limit} characters", field=field)


def _tokens(raw: bytes, served: Served) -> Tokens:
    if not raw:
        raise InvalidArgument("the prompt is empty", field="prompt_tokens_le32")
    if len(raw) % 4:
        raise InvalidArgument(f"{len(raw)} bytes are no u32 tokens", field="prompt_tokens_le32")
    tokens = np.frombuffer(raw, "<u4")
    highest = int(tokens.max())
    if highest >= served.card.config.vocab_size:
        raise InvalidArgument(
            f"token id {highest} is outside the vocabulary of {served.card.config.vocab_size}",
            field="prompt_tokens_le32",
        )
    return tokens


def _keys(packed: bytes, tokens: int, served: Served) -> list[BlockKey]:
    if packed and len(packed) != KEY_BYTES * (tokens // served.layout.block_tokens):
        raise InvalidArgument(
            f"{tokens} tokens have {tokens // served.layout.block_tokens} block keys of {KEY_BYTES} bytes, "
            f"got {len(packed)} bytes",
            field="block_keys",
        )
    return unpack_keys(packed)


def _sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        # Six decimals give back what was written before it became a float32.
        temperature=round(message.temperature, 6),
        top_k=message.top_k,
        top_p=round(message.top_p, 6) or 1.0,
        seed=message.seed,
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
    )


def _fetches(messages: Iterable[common_pb2.FetchSpan], blocks: int) -> tuple[FetchSpan, ...]:
    spans: list[FetchSpan] = []
    end = 0
    for message in messages:
        if len(spans) >= MAX_FETCH_SPANS:
            raise InvalidArgument(f"more than {MAX_FETCH_SPANS} spans to fetch", field="fetches")
        first = message.first_block
        if first < end or not message.block_count or first + message.block_count > blocks:
            raise InvalidArgument("spans to fetch must be in block order and inside the prompt", field="fetches")
        end = first + message.block_count
        spans.append(FetchSpan(message.source_id, message.source_address, message.source, first, end))
    return tuple(spans)
