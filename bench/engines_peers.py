"""Peers that are measured with real vLLM servers, beside ``bench/engines_sides.py``: LMCache and Dynamo's router.

Each is installed without its dependencies, beside vLLM's own environment, which has what these parts need."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from bench.engines_sides import Side, router_side, two_servers
from bench.peers import peer_python
from bench.router_sides import _free_port, _until_healthy
from launch import vllm
from launch.process import ROOT
from launch.vllm import VllmServer

LMCACHE = "lmcache==0.5.6"
LMCACHE_NEEDS = ("aiofile", "aiofiles", "caio", "nvtx", "opentelemetry-exporter-prometheus", "sortedcontainers")
DYNAMO = "ai-dynamo==1.6.1"
DYNAMO_NEEDS = ("ai-dynamo-runtime==1.6.1",)
POOL_GIB = 2
BLOCK_TOKENS = 32
START_S = 180.0
"""The time within which a peer must serve: it imports PyTorch, which takes long on a busy machine."""
END_S = 10.0
SHARED_MEMORY = Path("/dev/shm")


def peers_python(requirement: str, module: str, needs: Sequence[str]) -> Path:
    """Returns the Python of a peer that is installed beside vLLM. Raises :class:`bench.peers.PeerUnavailable`."""
    return peer_python(requirement, module, also=needs, alone=True, beside=vllm.vllm_python().parent.parent)


def lmcache_python() -> Path:
    return peers_python(LMCACHE, "lmcache.v1.multiprocess.server", LMCACHE_NEEDS)


def dynamo_python() -> Path:
    return peers_python(DYNAMO, "dynamo.frontend.main", DYNAMO_NEEDS)


@contextlib.contextmanager
def lmcache_side(model: Path, more: Sequence[str], folder: Path) -> Iterator[Side]:
    """Runs LMCache's server, two vLLM servers with its connector, and vllm-router without regard to prefixes.

    The data go the way that LMCache has for servers without a GPU: through shared memory, copied by the engine. Its
    chunk is vLLM's block, so that it reuses as much of a prompt as the pool."""
    python = lmcache_python()
    port, http, segment = _free_port(), _free_port(), f"pinyon_bench_{os.getpid()}"
    command = [
        str(python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", str(POOL_GIB),
        "--chunk-size", str(BLOCK_TOKENS), "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
        "--shm-name", segment, "--disable-observability",
    ]  # fmt: skip
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    connector = ("--kv-transfer-config", json.dumps(transfer))
    try:
        with _running(command, folder / "lmcache.log", vllm.ENVIRONMENT) as pid:
            _until_healthy(f"http://127.0.0.1:{http}/healthcheck", START_S)
            with (
                two_servers(model, (*more, *connector), folder, name="lmcache", events=False, python=python) as servers,
                router_side("round_robin", servers, folder) as router,
            ):
                yield Side("lmcache", router.url, [pid, *router.pids], servers)
    finally:
        for left in SHARED_MEMORY.glob(f"*{segment}*"):  # a server that was killed leaves it
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def dynamo_side(servers: list[VllmServer], model: Path, folder: Path) -> Iterator[Side]:
    """Runs Dynamo's frontend with its KV router, and a worker for each server, which ``bench/engines_dynamo.py`` is.

    They find each other by files. Their events go through a broker, as without one the workers listen on all
    interfaces."""
    python, port = str(dynamo_python()), _free_port()
    home, (into, out) = folder / f"dynamo-{port}", (f"tcp://127.0.0.1:{_free_port()}" for _ in range(2))
    home.mkdir()
    environment = {
        "DYN_FILE_KV": str(home / "kv"),
        "DYN_LOG": "warn",  # it writes a line for each request all the same
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_ZMQ_BROKER_ENABLED": "true",
        "DYN_ZMQ_BROKER_URL": f"xsub={into} , xpub={out}",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),  # it keeps copies of tokenizers there
        "PYTHONPATH": str(ROOT),
    }
    worker = [python, "-m", "bench.engines_dynamo"]
    frontend = [
        python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv",
        "--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq",
        "--kv-cache-block-size", str(BLOCK_TOKENS),
    ]  # fmt: skip
    with contextlib.ExitStack() as running:

        def start(name: str, command: Sequence[str]) -> int:
            return running.enter_context(_running(command, home / f"{name}.log", environment))

        pids = [start("broker", [*worker, "broker", into, out]), start("frontend", frontend)]
        for server in servers:
            events, _ = server.endpoints_of_events  # type: ignore[attr-defined]
            arguments = (server.url, f"tcp://127.0.0.1:{events}", str(model), model.name, json.dumps(_known(server)))
            pids.append(start(server.name, [*worker, "worker", *arguments]))
        _until_healthy(f"http://127.0.0.1:{port}/health", START_S)
        _until_served(f"http://127.0.0.1:{port}", model.name, len(servers))
        yield Side("dynamo", f"http://127.0.0.1:{port}", pids, servers)


def _known(server: VllmServer) -> dict[str, int]:
    """Returns what Dynamo's own worker would tell its router of the server."""
    with urlopen(f"{server.url}/metrics", timeout=30) as answer:
        blocks = re.search(r'num_gpu_blocks="(\d+)"', answer.read().decode())
    assert blocks is not None
    return {
        "block_tokens": BLOCK_TOKENS,
        "blocks": int(blocks[1]),
        "requests": _argument("--max-num-seqs"),
        "batch_tokens": _argument("--max-num-batched-tokens"),
        "context": _argument("--max-model-len"),
    }


def _argument(name: str) -> int:
    return int(vllm.ARGUMENTS[vllm.ARGUMENTS.index(name) + 1])


@contextlib.contextmanager
def _running(command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Runs a process while the block runs, and yields its id. Raises :class:`RuntimeError` if it ended before that."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
    try:
        yield process.pid
        if process.poll() is not None:
            raise RuntimeError(f"{log_path.stem} ended: {log_path.read_text(errors='replace')[-800:]}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_served(url: str, model: str, number: int) -> None:
    """Waits until the frontend has so many workers, and an answer to a small prompt."""
    deadline_s = time.monotonic() + START_S
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    while time.monotonic() < deadline_s:
        with urlopen(f"{url}/health", timeout=10) as answer:
            instances = json.load(answer).get("instances", [])
        if sum(each["endpoint"] == "generate" for each in instances) == number:
            request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            with (
                contextlib.suppress(HTTPError),
                urlopen(request, timeout=60),
            ):  # 404 until it has read the model's files
                return
        time.sleep(0.2)
    raise RuntimeError(f"Dynamo's frontend did not serve {number} workers in {START_S:g} s")
