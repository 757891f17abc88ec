"""Traces of requests: their formats and what they tell."""

from pinyon.traces.formats import FORMATS, Format
from pinyon.traces.reader import TraceFile
from pinyon.traces.row import TraceRow
from pinyon.traces.writer import TraceWriter

__all__ = ["FORMATS", "Format", "TraceFile", "TraceRow", "TraceWriter"]
