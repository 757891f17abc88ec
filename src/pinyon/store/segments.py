"""Moved to :mod:`pinyon.messages.segment`."""

from pinyon.messages.segment import segment_from_proto, segment_to_proto

__all__ = ["segment_from_proto", "segment_to_proto"]
