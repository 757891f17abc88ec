"""Segments as text, for tests that tell another process of one."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.messages.segment import segment_from_proto, segment_to_proto
from pinyon.transfer import SegmentDescriptor


def text_of(segment: SegmentDescriptor) -> str:
    return segment_to_proto(segment).SerializeToString().hex()


def segment_of(text: str) -> SegmentDescriptor:
    return segment_from_proto(common_pb2.Segment.FromString(bytes.fromhex(text)))
