"""A suite with a vLLM server for prompts and two that decode, each behind a proxy that can cut its streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import cluster as launching
from launch.cluster import LocalCluster
from launch.vllm import VllmServer
from tests.vllm import soak
from tests.vllm.ask import counter
from tests.vllm.conftest import started
from tests.vllm.cutting import CuttingProxy


@contextmanager
def started_pairs(
    model: Path, seed: int, tokens: int, more: tuple[str, ...] = ()
) -> Iterator[tuple[LocalCluster, list[CuttingProxy]]]:
    """Runs the suite with ``more`` arguments of vLLM, for streams of that many ``tokens``."""
    proxies: list[CuttingProxy] = []
    cut: set[bytes] = set()

    class ProxiedServer(VllmServer):
        def __init__(self, name: str, model: Path, served: str, host: str, port: int, connector: Any, *more: Any):
            proxy = CuttingProxy(host, cluster._port(0), port, seed + len(proxies), tokens - 1, cut)
            proxy.start()
            proxies.append(proxy)
            super().__init__(name, model, served, host, port, {**connector, "server_url": proxy.url}, *more)

    spec = soak.small_cluster(str(model), apart=True)
    cluster = LocalCluster(replace(spec, extra={"vllm": (*spec.extra["vllm"], *more)}))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launching.vllm, "VllmServer", ProxiedServer)
            with started(cluster):
                yield cluster, proxies
    finally:
        for proxy in proxies:
            proxy.close()


def servers(cluster: LocalCluster, role: str = "") -> list[VllmServer]:
    return [each for each in cluster.services.values() if isinstance(each, VllmServer) and each.name.startswith(role)]


@contextmanager
def cutting(proxies: list[CuttingProxy]) -> Iterator[None]:
    for proxy in proxies:
        proxy.cutting = True
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.cutting = False


def resumes(cluster: LocalCluster) -> float:
    return counter(f"http://{cluster.services['lb-0'].endpoints['metrics']}", "pinyon_lb_resumes_total")


def own_metrics(server: VllmServer) -> str:
    """Returns where the connector shows its metrics, as its log says last."""
    assert server.log_path is not None
    found: list[str] = re.findall(r"metrics at (http://\S+)/metrics", server.log_path.read_text())
    return found[-1]
