"""The tests' clusters: with TLS everywhere when ``PINYON_TEST_TLS`` is set (``./dev test --tls``)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from launch.cluster import ClusterSpec, LocalCluster
from launch.process import START_S, ServiceProcess

CHUNKS = {"worker": ("--prefill-chunk-tokens", "96")}
"""Chunks so short that a prompt of a few hundred tokens takes several."""


ONE = {"prefill": 0, "decode": 0, "mixed": 1, "stores": 0}
"""A cluster of one instance, without a store."""
PACED = {**ONE, "engine": "paced", "engine_profile": "tiny", "pool_blocks": 256}
"""A cluster of one instance whose engine computes nothing."""


PATIENT = ("--conductor-timeout-s", "10")
"""A load balancer's patience: on a busy machine the conductor answers later than the default timeout."""


def cluster_spec(**values: Any) -> ClusterSpec:
    extra = values.pop("extra", {})
    values["extra"] = {**extra, "lb": (*PATIENT, *extra.get("lb", ()))}
    return ClusterSpec(**{"tls": os.environ.get("PINYON_TEST_TLS", "") not in ("", "0"), **values})


@contextlib.contextmanager
def frozen(*services: ServiceProcess) -> Iterator[None]:
    """Stops the processes meanwhile: they give no answer and close no connection."""
    for service in services:
        service.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for service in services:
            service.signal(signal.SIGCONT)


def start_again(cluster: LocalCluster, name: str) -> None:
    """Starts a stopped or killed service again, and waits until it has announced its endpoints."""
    service = cluster.services[name]
    service.start_again()
    service.wait_ready(time.monotonic() + START_S)
