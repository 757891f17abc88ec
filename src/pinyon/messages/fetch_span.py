"""Where reused blocks are read from."""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.fetch_span import FETCH_SPANS_MAX, FetchSpan, KvSource
from pinyon.messages.checks import ADDRESS_CHARS_MAX, check_text

_NUMBERS: dict[KvSource, common_pb2.KvSource] = {
    KvSource.PEER: common_pb2.KV_SOURCE_PEER,
    KvSource.STORE: common_pb2.KV_SOURCE_STORE,
}
_SOURCES: dict[int, KvSource] = {number: source for source, number in _NUMBERS.items()}


def fetch_span_to_proto(span: FetchSpan) -> common_pb2.FetchSpan:
    return common_pb2.FetchSpan(
        source_id=span.source_id,
        source_address=span.address,
        source=_NUMBERS[span.source],
        first_block=span.first,
        block_count=span.end - span.first,
    )


def fetch_spans_from_proto(messages: Iterable[common_pb2.FetchSpan], blocks: int) -> tuple[FetchSpan, ...]:
    """Spans in block order inside a prompt of so many ``blocks``. A source that is not named is a peer."""
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
