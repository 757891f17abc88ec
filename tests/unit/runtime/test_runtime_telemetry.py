"""Spans nest across hops by traceparent; when switched off, no part of OpenTelemetry is imported."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pinyon.core.request import RequestClass
from pinyon.runtime.telemetry import Telemetry


def test_spans_of_two_hops_share_a_trace():
    first, second = InMemorySpanExporter(), InMemorySpanExporter()
    lb, worker = Telemetry("lb", "lb-0", exporter=first), Telemetry("worker", "w-0", exporter=second)
    with lb.span("request", model="m") as root, worker.span("prefill", root.traceparent) as child:
        child.set("tokens", 3)
    lb.close()
    worker.close()
    (outer,), (inner,) = first.get_finished_spans(), second.get_finished_spans()
    assert inner.context.trace_id == outer.context.trace_id
    assert inner.parent.span_id == outer.context.span_id
    assert inner.attributes["tokens"] == 3
    assert outer.resource.attributes["service.name"] == "pinyon-lb"


def test_an_exception_marks_the_span():
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("lb", "lb-0", exporter=exporter)
    with pytest.raises(ValueError, match="no"), telemetry.span("request"):
        raise ValueError("no")
    telemetry.close()
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok


def test_a_malformed_parent_starts_a_new_trace():
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("lb", "lb-0", exporter=exporter)
    with telemetry.span("request", "not-a-traceparent") as span:
        assert len(span.traceparent) == 55
    telemetry.close()
    assert exporter.get_finished_spans()[0].parent is None


def test_a_span_names_the_class_without_its_cache_salt():
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("lb", "lb-0", exporter=exporter)
    with telemetry.span("request") as span:
        span.classify(RequestClass("chat", user="anna", cache_salt="grain"))
    telemetry.close()
    said = exporter.get_finished_spans()[0].attributes
    assert said["class.user"] == "anna"
    assert "grain" not in str(dict(said))


def test_off_costs_no_import():
    code = (
        "import sys; from pinyon.runtime.telemetry import Telemetry; t = Telemetry('a', 'b');\n"
        "with t.span('x') as s: assert s.traceparent == ''\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
