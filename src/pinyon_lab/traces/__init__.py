"""Traces of requests: their formats, their analysis, and generated traces."""

from pinyon_lab.traces.file import TraceFile, TraceWriter
from pinyon_lab.traces.formats import FORMATS, TraceRow

__all__ = ["FORMATS", "TraceFile", "TraceRow", "TraceWriter"]
