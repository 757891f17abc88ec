"""A load balancer in this process for the commands that ask one, and a short trace to replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pinyon.api.lb.v1 import lb_pb2

Serve = Callable[..., tuple[str, grpc.Server]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that serves a servicer until the test ends, and returns its address and the server.

    The health service calls what is served a load balancer."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)

        def started(
            add: Callable[[Any, grpc.Server], None], servicer: object, *, ready: bool = True
        ) -> tuple[str, grpc.Server]:
            names, statuses = health.HealthServicer(), health_pb2.HealthCheckResponse
            name = lb_pb2.DESCRIPTOR.services_by_name["LbService"].full_name
            names.set(name, statuses.SERVING if ready else statuses.NOT_SERVING)
            health_pb2_grpc.add_HealthServicer_to_server(names, server)
            add(servicer, server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
            return address, server

        yield started
        server.stop(None).wait()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """The path of a trace of three requests."""
    rows = [{"timestamp": n, "input_length": 9, "output_length": 1, "hash_ids": [n]} for n in range(3)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
