"""Traces of requests: their formats, their analysis, and generated traces."""

from pinyon_lab.traces.formats import FORMATS, Format, TraceRow
from pinyon_lab.traces.reader import TraceFile
from pinyon_lab.traces.writer import TraceWriter

__all__ = ["FORMATS", "Format", "TraceFile", "TraceRow", "TraceWriter"]
