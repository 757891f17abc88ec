"""OpenTelemetry traces over OTLP when an endpoint is configured; nothing at all otherwise.

Streams carry many requests, so trace context travels in the messages' ``traceparent`` fields and not in call metadata.
"""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any

from pinyon.core.request import RequestClass

Attribute = str | bool | int | float


class Span:
    """A span: ``with telemetry.span("name", traceparent) as span``. This one is used without tracing, for all spans."""

    traceparent = ""
    """The W3C context for the next hop; empty when tracing is off."""

    def set(self, key: str, value: Attribute) -> None:
        return

    def classify(self, value: RequestClass) -> None:
        """Adds the request's class as attributes ``class.*``, without its cache salt, which is a secret."""

    def error(self, error: BaseException) -> None:
        return

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


_NO_SPAN = Span()


class _RealSpan(Span):
    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set(self, key: str, value: Attribute) -> None:
        self._span.set_attribute(key, value)

    def classify(self, value: RequestClass) -> None:
        said = asdict(value)
        del said["cache_salt"]
        self._span.set_attributes({f"class.{name}": each for name, each in said.items()})

    def error(self, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.record_exception(error)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.error(error)
        self._span.end()


class Telemetry:
    """The process's tracer. The OpenTelemetry packages are imported only when ``otlp_endpoint`` is set."""

    def __init__(self, service: str, instance_id: str, otlp_endpoint: str = "") -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if not otlp_endpoint:
            return
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=otlp_endpoint.startswith("http://"))
        resource = Resource.create({"service.name": f"pinyon-{service}", "service.instance.id": instance_id})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = self._provider.get_tracer("pinyon")

    def span(self, name: str, traceparent: str = "", **attributes: Attribute) -> Span:
        """Starts a span below the one named by ``traceparent`` (a root span if that is empty or malformed)."""
        if self._tracer is None:
            return _NO_SPAN
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
        return _RealSpan(self._tracer.start_span(name, context=parent, attributes=attributes))

    def close(self) -> None:
        """Sends the remaining spans, bounded by the exporter's own timeout."""
        if self._provider is not None:
            self._provider.shutdown()
