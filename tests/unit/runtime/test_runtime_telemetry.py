"""Spans nest across hops by traceparent; when switched off, no part of OpenTelemetry is imported."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pinyon.core.request import RequestClass
from pinyon.runtime.telemetry import Telemetry


@pytest.fixture
def exporter(monkeypatch):
    """Takes the place of the exporter of all tracers."""
    made = InMemorySpanExporter()
    monkeypatch.setattr(made, "shutdown", lambda: None)  # several tracers close it
    module = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setattr(f"{module}.OTLPSpanExporter", lambda **_: made)
    return made


def test_spans_of_two_hops_share_a_trace(exporter):
    lb, worker = Telemetry("lb", "lb-0", "http://there"), Telemetry("worker", "w-0", "http://there")
    with lb.span("request", model="m") as root, worker.span("prefill", root.traceparent) as child:
        child.set("tokens", 3)
    lb.close()
    worker.close()
    inner, outer = sorted(exporter.get_finished_spans(), key=lambda span: span.parent is None)
    assert inner.context.trace_id == outer.context.trace_id
    assert inner.parent.span_id == outer.context.span_id
    assert inner.attributes["tokens"] == 3
    assert outer.resource.attributes["service.name"] == "pinyon-lb"


def test_an_exception_marks_the_span(exporter):
    telemetry = Telemetry("lb", "lb-0", "http://there")
    with pytest.raises(ValueError, match="no"), telemetry.span("request"):
        raise ValueError("no")
    telemetry.close()
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok


def test_a_malformed_parent_starts_a_new_trace(exporter):
    telemetry = Telemetry("lb", "lb-0", "http://there")
    with telemetry.span("request", "not-a-traceparent") as span:
        assert len(span.traceparent) == 55
    telemetry.close()
    assert exporter.get_finished_spans()[0].parent is None


def test_a_span_names_the_class_without_its_cache_salt(exporter):
    telemetry = Telemetry("lb", "lb-0", "http://there")
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
