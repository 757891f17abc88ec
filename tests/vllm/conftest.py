"""Real vLLM servers behind the suite; skipped with the reason where vLLM is not installed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import vllm
from launch.cluster import ClusterSpec, LocalCluster
from launch.ports import HeldPorts
from launch.process import await_ready
from launch.vllm import VllmServer
from pinyon.core.errors import Unavailable

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def pytest_report_header() -> str:
    return f"vLLM: {vllm.VERSION}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if not os.environ.get("PINYON_TEST_VLLM"):
        reason = "real vLLM takes minutes: ./dev test vllm"
    else:
        try:
            vllm.vllm_python()
        except Unavailable as error:
            reason = error.message
    for item in items:
        if reason and Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model() -> Path:
    return vllm.small_checkpoint()


@pytest.fixture(scope="module")
def suite(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A suite with two vLLM servers, a store node, a conductor and a load balancer."""
    spec = ClusterSpec(
        prefill=0, decode=0, mixed=2, engine="vllm", model=str(model), store_mib=512, extra={"vllm": TOOLS}
    )
    with started(LocalCluster(spec, tmp_path_factory.mktemp("suite"))) as cluster:
        yield cluster


@contextmanager
def started(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Runs a cluster whose vLLM servers are patient: on a slow machine, too, the store's answers come in time."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PINYON_VLLM_LOOK_S", "5")
        environment.setenv("PINYON_VLLM_LOAD_S", "20")
        cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def servers(suite: LocalCluster) -> list[VllmServer]:
    return [each for each in suite.of_kind("mixed") if isinstance(each, VllmServer)]


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM server that knows nothing of the suite."""
    with serving(model, tmp_path_factory.mktemp("alone"), more=TOOLS) as server:
        yield server


@contextmanager
def serving(
    model: Path,
    folder: Path,
    connector: Mapping[str, object] | None = None,
    module: str = "pinyon.vllm",
    environment: Mapping[str, str] = {},
    more: Sequence[str] = (),
) -> Iterator[VllmServer]:
    """Runs one vLLM server, with the connector if it is given settings."""
    with HeldPorts() as ports:
        port = ports.take("127.0.0.1")
        server = VllmServer("one", model, "tiny", "127.0.0.1", port, connector, folder / "one.log", more)
        server.arguments = [each.replace("pinyon.vllm", module) for each in server.arguments]
        kept = dict(os.environ)
        os.environ.update(environment)
        try:
            server.spawn()
        finally:
            os.environ.clear()
            os.environ.update(kept)
        try:
            await_ready([server], time.monotonic() + vllm.START_S)
            yield server
        finally:
            server.kill()
