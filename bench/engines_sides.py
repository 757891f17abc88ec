"""The front ends that are measured beside each other before real vLLM servers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from bench.peers import peer_python
from bench.router_sides import LEVELS, PEERS, _free_port, _until_healthy
from launch import vllm
from launch.cluster import ClusterSpec, LocalCluster
from launch.ports import HeldPorts
from launch.process import ServiceProcess, await_ready, end_all
from launch.vllm import VllmServer
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc

START_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")
COUNTERS = {
    "tokens": "vllm:prefix_cache_queries_total",
    "local": "vllm:prefix_cache_hits_total",
    "loaded": "vllm:external_prefix_cache_hits_total",
}


@dataclass
class Side:
    """A front end at ``url``, the processes that it is made of, and the servers behind it."""

    name: str
    url: str
    pids: list[int]
    servers: list[VllmServer]
    addresses: dict[str, str] = field(default_factory=dict)
    """The addresses at which instances lend their blocks, by name."""

    def forget(self) -> None:
        """Empties the servers' own prefix caches."""
        for server in self.servers:
            urlopen(Request(f"{server.url}/reset_prefix_cache", method="POST"), timeout=30).read()

    def hits(self) -> dict[str, float]:
        """Returns the sums of vLLM's own counters."""
        found = dict.fromkeys(COUNTERS, 0.0)
        for server in self.servers:
            with urlopen(f"{server.url}/metrics", timeout=30) as answer:
                for line in answer.read().decode().splitlines():
                    for name, counter in COUNTERS.items():
                        if line.startswith(counter):
                            found[name] += float(line.rsplit(" ", 1)[1])
        return found

    def cpu_s(self) -> float:
        """Returns the CPU time of all that is not vLLM."""
        return sum(map(_cpu_s, self.pids))

    def server_cpu_s(self) -> float:
        """Returns the CPU time of vLLM's processes."""
        groups = {server.pid for server in self.servers}
        total = 0.0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.getpgid(int(entry.name)) in groups:
                        total += _cpu_s(int(entry.name))
        return total


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def warm(servers: Sequence[VllmServer], model: str) -> None:
    """Has each server compute something: the first prompts take seconds more."""
    for server in servers:
        for number in range(3):
            ask(server, model, [97 + number] * 1000)


def ask(server: VllmServer, model: str, prompt: list[int], **fields: Any) -> None:
    """Has the server compute a prompt, and one token more."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    request = Request(f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        answer.read()


@contextlib.contextmanager
def two_servers(
    model: Path,
    more: Sequence[str],
    folder: Path,
    *,
    name: str = "plain",
    events: bool = True,
    python: Path | None = None,
) -> Iterator[list[VllmServer]]:
    """Runs two vLLM servers that know nothing of us. They publish their KV events where these are wanted."""
    with HeldPorts() as ports:
        servers = []
        for number in range(2):
            live, replay, port = (ports.take("127.0.0.1") for _ in range(3))
            config = (
                f'{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:{live}",'
                f'"replay_endpoint":"tcp://*:{replay}"}}'
            )
            each = f"{name}-{number}"
            server = VllmServer(
                each, model, model.name, "127.0.0.1", port, None, folder / f"{each}.log",
                (*more, *(("--kv-events-config", config) if events else ())), python=python,
            )  # fmt: skip
            server.endpoints_of_events = (live, replay)  # type: ignore[attr-defined]
            servers.append(server)
            server.spawn()
        try:
            await_ready(servers, time.monotonic() + 2 * vllm.START_S)
            warm(servers, model.name)
            yield servers
        finally:
            for server in servers:
                server.kill()


@contextlib.contextmanager
def router_side(policy: str, servers: list[VllmServer], folder: Path) -> Iterator[Side]:
    """Runs vllm-router with one of its policies."""
    requirement, module = PEERS["vllm_router"]
    port, metrics = _free_port(), _free_port()
    python = str(peer_python(requirement, module))
    command = [
        python, "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(metrics), "--policy", policy, "--log-level", LEVELS["vllm_router"],
        "--worker-urls", *[server.url for server in servers],
    ]  # fmt: skip
    with (folder / f"{policy}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _until_healthy(f"http://127.0.0.1:{port}/health")
        yield Side(policy, f"http://127.0.0.1:{port}", [process.pid], servers)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def upstream_side(servers: list[VllmServer], folder: Path) -> Iterator[Side]:
    upstream = ",".join(server.url for server in servers)
    with _services(folder, ("lb", "services.lb", ["--upstream", upstream, *_LB])) as (lb,):
        yield _ready(Side("upstream", f"http://{lb.endpoints['http']}", [lb.pid], servers))


@contextlib.contextmanager
def conductor_side(servers: list[VllmServer], model: Path, folder: Path) -> Iterator[Side]:
    """Runs a conductor, a load balancer, and an agent beside each server."""
    with _services(folder, ("conductor", "services.conductor", [])) as (conductor,):
        joins = ["--conductor", conductor.endpoints["grpc"]]
        agents = []
        for server in servers:
            events, replay = server.endpoints_of_events  # type: ignore[attr-defined]
            feeds = ["--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}"]
            agents.append((f"agent-{server.name}", "services.agent", [*joins, *feeds, "--server", server.url]))
        lb = ("lb-agent", "services.lb", [*joins, "--model", str(model), "--served-model-name", model.name, *_LB])
        with _services(folder, lb, *agents) as made:
            yield _ready(
                Side(
                    "agent",
                    f"http://{made[0].endpoints['http']}",
                    [conductor.pid, *(each.pid for each in made)],
                    servers,
                )
            )


@contextlib.contextmanager
def pool_side(model: Path, more: Sequence[str], folder: Path, name: str = "pool") -> Iterator[Side]:
    """Yields the side with our connector in both servers; ``pairs``: one of them is for prompts, the other decodes."""
    apart = name == "pairs"
    spec = ClusterSpec(
        prefill=int(apart), decode=int(apart), mixed=0 if apart else 2, engine="vllm", model=str(model), store_mib=2048,
        log_level="warning", extra={"vllm": tuple(more)},
    )  # fmt: skip
    with LocalCluster(spec, folder / name) as cluster:
        servers = [each for each in cluster.services.values() if isinstance(each, VllmServer)]
        warm(servers, model.name)
        pids = [each.pid for each in cluster.processes if not isinstance(each, VllmServer)]
        with cluster.access.channel(cluster.services["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorServiceStub(channel)
            listed = stub.ListInstances(conductor_pb2.ListInstancesRequest(), timeout=START_S).instances
        yield Side(name, cluster.http, pids, servers, {each.info.instance_id: each.info.address for each in listed})


_LB = ["--http-listen", "127.0.0.1:0", "--log-level", "warning", "--drain-s", "0", "--lame-duck-s", "0"]


@contextlib.contextmanager
def _services(folder: Path, *wanted: tuple[str, str, list[str]]) -> Iterator[list[ServiceProcess]]:
    made = [ServiceProcess(name, module, options, folder / f"{name}.log") for name, module, options in wanted]
    try:
        for process in made:
            process.spawn()
        await_ready(made, time.monotonic() + START_S)
        yield made
    finally:
        end_all(made, 5.0)


def _ready(side: Side) -> Side:
    _until_healthy(f"{side.url}/health/ready")
    return side
