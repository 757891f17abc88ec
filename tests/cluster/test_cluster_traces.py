"""One request is one trace across all hops: load balancer, conductor, prefill, KV store, decode."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import fields
from typing import Any, NamedTuple

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.request import RequestClass
from tests.cluster.specs import cluster_spec
from tests.forks import forked
from tests.waiting import wait_until


class Span(NamedTuple):
    service: str
    instance: str
    trace: bytes
    id: bytes
    parent: bytes
    name: str
    request_class: dict[str, str]
    """The span's attributes ``class.*``, in a form that compares."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP endpoint that keeps the spans it receives."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.spans: list[Span] = []
        self.port = 0

    def Export(self, request, context):
        with self.changed:
            for resource in request.resource_spans:
                facts = {item.key: item.value.string_value for item in resource.resource.attributes}
                names = (facts["service.name"], facts["service.instance.id"])
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        said = {item.key: str(item.value) for item in span.attributes if item.key.startswith("class.")}
                        ids = (span.trace_id, span.span_id, span.parent_span_id)
                        self.spans.append(Span(*names, *ids, span.name, said))
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, look: Callable[[dict[bytes, set[str]]], Any]) -> Any:
        """Returns the first true result of ``look`` for the hops of each trace. A worker's hop is its role."""
        deadline = time.monotonic() + 60
        with self.changed:
            while True:
                hops: dict[bytes, set[str]] = {}
                for span in self.spans:
                    role = span.instance.rpartition("-")[0]
                    hops.setdefault(span.trace, set()).add(role if span.service == "pinyon-worker" else span.service)
                if found := look(hops):
                    return found
                assert self.changed.wait(deadline - time.monotonic()), f"not found in {hops}"


@pytest.fixture
def collector():
    server = grpc.server(futures.ThreadPoolExecutor(4))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector
    server.stop(1).wait(5)


def test_a_request_that_reads_from_the_store_is_one_trace(collector, tmp_path):
    spec = cluster_spec(prefill=2, decode=1, otlp_endpoint=f"http://127.0.0.1:{collector.port}")
    wanted = {"pinyon-lb", "pinyon-conductor", "prefill", "decode", "pinyon-kvstore"}
    with LocalCluster(spec, tmp_path, forked) as cluster, cluster.access.channel(cluster.services["lb-0"]) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)
        request = lb_pb2.GenerateRequest(
            prompt="A long enough prompt for several blocks. " * 20,
            sampling=common_pb2.SamplingParams(max_tokens=4),
            labels=lb_pb2.RequestLabels(kind="file", turn=3, session="s-1", user="anna", priority=-2),
        )
        # The first run computes the prompt and stores it. With its prefill instance killed, and the other one empty, a
        # later run must read from the store.
        assert list(stub.Generate(request, timeout=90))
        collector.wait_for(lambda hops: any("prefill" in found for found in hops.values()))
        holder = next(span.instance for span in collector.spans if span.instance.startswith("prefill-"))
        wait_stored(cluster)
        cluster.services[holder].kill()
        assert list(stub.Generate(request, timeout=90))
        trace = collector.wait_for(lambda hops: [trace for trace, found in hops.items() if wanted <= found])[0]
        spans = [span for span in collector.spans if span.trace == trace]
    ids = {span.id for span in spans}
    roots = [span for span in spans if span.parent not in ids]
    assert len(roots) == 1, f"not one tree: {[(span.instance, span.name) for span in roots]}"
    assert roots[0].service == "pinyon-lb"
    # Every hop got the same class: load balancer, conductor, decode, prefill, store.
    said = roots[0].request_class
    assert len(said) == len(fields(RequestClass)) - 1, "all but the cache salt"
    assert all(text in said[name] for name, text in {
        "class.kind": "file", "class.turn": "3", "class.session": "s-1", "class.user": "anna", "class.priority": "-2",
        "class.tenant": "public",
    }.items())  # fmt: skip
    assert [(span.instance, span.name) for span in spans if span.request_class != said] == []


def wait_stored(cluster: LocalCluster) -> None:
    """Waits until the background puts have ended."""

    def stored() -> bool:
        scrape = Scrape(cluster)
        return scrape.total("pinyon_kvstore_objects") > 0 == scrape.total("pinyon_worker_store_queue_blocks")

    wait_until(stored, "the blocks are stored")
