"""The demo's report on the path that the KV took."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from rich.console import Console

from launch import demo
from launch.demo import show_ways, why_late
from launch.demo_client import DemoAnswer
from pinyon.runtime.metrics import MetricsServer


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A cluster of one service, with the counters of what that one has moved."""
    registry, labels = CollectorRegistry(), ("transport", "local_nic", "remote_nic")
    counters = {"path": Counter("pinyon_transfer_path_bytes", "moved", labels, registry=registry)}
    for name in ("put", "get"):
        counters[name] = Counter(f"pinyon_kvstore_{name}_bytes", name, registry=registry)
    server = MetricsServer("127.0.0.1:0", registry)
    log = tmp_path / "worker.log"
    log.write_text("I ready\nI not using shm with a peer on this host: the kernel forbids it\n")
    service = SimpleNamespace(alive=True, endpoints={"metrics": server.address}, log_path=log)
    yield SimpleNamespace(services={"worker": service}, **counters)
    server.close()


def shown(cluster: Any) -> list[str]:
    text = io.StringIO()
    show_ways(Console(file=text, width=200), cluster)
    return text.getvalue().splitlines()


def test_the_bytes_of_each_way_and_of_the_store(cluster: Any) -> None:
    cluster.path.labels("shm", "", "").inc(12_340_000)
    cluster.path.labels("tcp", "eth0", "eth1").inc(100_000)  # a trial transfer of the engine
    cluster.put.inc(3_000_000)
    cluster.get.inc(1_500_000)
    assert shown(cluster) == [
        "KV moved between processes: 12.3 MB by shm, 0.1 MB by tcp; 3.0 MB of it into the KV store, 1.5 MB out of it."
    ]


@pytest.mark.parametrize(
    ("unavailable", "reason"), [(None, "the kernel forbids it"), ("no process_vm_readv", "no process_vm_readv")]
)
def test_why_it_was_not_shm(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, unavailable: str | None, reason: str
) -> None:
    monkeypatch.setattr(demo, "shm_available", lambda: unavailable)
    cluster.path.labels("tcp", "", "").inc(1_000_000)
    first, second = shown(cluster)
    assert "0.0 MB by shm, 1.0 MB by tcp" in first
    assert second == f"Not by shm, though all are on this host: {reason}"


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        ((2624, 0), "batch 1 reused what batch 2 was computing at the same time"),
        ((0, 2624), "batch 2 reused what batch 1 was computing at the same time"),
        ((0, 0), ""),
        ((32, 32), ""),
    ],
)
def test_a_long_ttft_in_spite_of_reuse_is_explained(cached: tuple[int, int], said: str) -> None:
    batch = [DemoAnswer(f"batch {number}", cached_tokens=tokens) for number, tokens in enumerate(cached, 1)]
    shown = why_late([DemoAnswer("chat turn 1"), *batch, DemoAnswer("batch 3", cached_tokens=9)])
    assert shown.startswith(said)
    assert bool(shown) == bool(said)
