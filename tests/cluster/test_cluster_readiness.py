"""A load balancer is ready when a request would be served now, and otherwise says what is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from tests.cluster.specs import cluster_spec, start_again
from tests.forks import forked

WAIT_S = 60.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def running(tmp_path) -> Iterator[LocalCluster]:
    with LocalCluster(cluster_spec(prefill=1, decode=2, stores=0), tmp_path, forked) as running:
        yield running


def ready(cluster: LocalCluster) -> tuple[int, str]:
    """Returns the status and text of ``/health/ready``."""
    connection = cluster.access.http(cluster.services["lb-0"], timeout_s=WAIT_S)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def generate(cluster: LocalCluster) -> tuple[int, str]:
    """Returns the status of a completion, and the text of an error."""
    connection = cluster.access.http(cluster.services["lb-0"], timeout_s=WAIT_S)
    try:
        body = json.dumps({"model": "pinyon-tiny", "prompt": "The jay", "max_tokens": 4})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, "" if response.status == 200 else text
    finally:
        connection.close()


def health(cluster: LocalCluster) -> set[int]:
    """Returns the states that the gRPC health service reports for the whole service and for the front door."""
    with cluster.access.channel(cluster.services["lb-0"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ("", "pinyon.api.lb.v1.LbService")
        return {stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S).status for name in names}


def wait_ready(cluster: LocalCluster, status: int) -> str:
    """Waits until HTTP and then gRPC report the status; returns the text."""
    deadline = time.monotonic() + WAIT_S
    while (said := ready(cluster))[0] != status or health(cluster) != {SERVING if status == 200 else NOT_SERVING}:
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    return said[1]


def wait_metric(cluster: LocalCluster, name: str, value: float) -> None:
    deadline = time.monotonic() + WAIT_S
    while Scrape(cluster).total(name) != value:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_a_conductor_the_instances_are_asked(running):
    wait_ready(running, 200)
    assert health(running) == {SERVING}
    wait_metric(running, "pinyon_lb_instances", 3)  # without a conductor it learns of no further instance
    running.services["conductor"].kill()
    wait_metric(running, "pinyon_lb_conductor_connected", 0)
    # Two rounds of probes: a live instance is not taken for dead.
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert generate(running) == (200, "")
    wait_ready(running, 200)  # an instance that had no time to answer is heard in the next round
    running.services["decode-0"].kill()
    assert generate(running) == (200, ""), "one is left"
    wait_ready(running, 200)
    running.services["decode-1"].kill()
    text = wait_ready(running, 503)
    assert "generates tokens" in text
    assert "1 that compute prompts" in text
    assert "conductor does not answer" in text
    running.services["prefill-0"].kill()
    deadline = time.monotonic() + WAIT_S
    while "No instance of pinyon-tiny is available" not in ready(running)[1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name in ("conductor", "prefill-0", "decode-1"):
        start_again(running, name)
    wait_ready(running, 200)
    assert generate(running) == (200, "")


def test_with_a_conductor_its_list_counts(running):
    wait_ready(running, 200)
    wait_metric(running, "pinyon_lb_instances", 3)
    running.services["prefill-0"].kill()
    text = wait_ready(running, 503)
    assert "computes prompts" in text
    assert "2 that generate tokens" in text
    assert "conductor does not" not in text
    start_again(running, "prefill-0")
    wait_ready(running, 200)
    for name in ("decode-0", "decode-1"):
        running.services[name].kill()
    assert "generates tokens" in wait_ready(running, 503)
    start_again(running, "decode-0")
    wait_ready(running, 200)
    assert generate(running) == (200, "")
