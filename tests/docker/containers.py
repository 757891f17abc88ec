"""The suite as containers, for the tests: builds the image, starts ``deploy/compose.yaml``, watches and stops it.

Docker has no event for this across all engines and compose versions, so waits poll, always with a deadline."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.runtime.channel import tls_options
from pinyon.runtime.identity import CONDUCTOR, peer_name
from pinyon.runtime.tls import client_credentials

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGE = "pinyon:test"
PUBLIC_BASE = "python:3.12-slim-bookworm"
SERVICES = ("redis", "conductor", "kvstore", "prefill-1", "prefill-2", "decode-1", "decode-2", "lb")
REGISTERED = frozenset({"kvstore", "prefill-1", "prefill-2", "decode-1", "decode-2"})

WAIT_S = 300.0
"""The longest wait for anything but the build; it only ends what hangs."""
BUILD_S = 900.0

PIDS = Path("/proc/self/ns/pid")
_HERE = f"{socket.gethostname()} {PIDS.stat().st_ino if PIDS.exists() else ''}"
OURS = f"pinyontest_{zlib.crc32(_HERE.encode()):08x}_"
"""The prefix of compose projects of test runs in this process namespace; the process id of the run follows."""

Value = TypeVar("Value")


class NoContainers(Exception):
    """The error when this machine cannot run the suite as containers; the message says why."""


def run(
    *command: str, timeout_s: float = WAIT_S, env: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs a command from the repository root; on failure raises an error with all its output."""
    try:
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{' '.join(command)} took longer than {timeout_s} s: {error.stderr!r}") from None
    if check and result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: status {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def until(what: str, look: Callable[[], Value | None], timeout_s: float = WAIT_S) -> Value:
    """Returns the first true value of ``look``; fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.25)  # polls until the deadline


def find_compose() -> tuple[str, ...]:
    """Returns the compose command of this machine. Raises :class:`NoContainers` without one, or without an engine."""
    if shutil.which("docker") is None:
        raise NoContainers("no docker command (tools/docker_engine.sh installs one)")
    if run("docker", "version", check=False).returncode != 0:
        raise NoContainers("no Docker engine answers (tools/docker_engine.sh starts one)")
    if run("docker", "compose", "version", check=False).returncode == 0:
        return ("docker", "compose")
    if not shutil.which("docker-compose") or run("docker-compose", "version", check=False).returncode:
        raise NoContainers("neither docker compose nor docker-compose is there (tools/docker_engine.sh installs one)")
    return ("docker-compose",)


def find_base() -> dict[str, str]:
    """Returns settings of the build: the local base image and wheels, else public ones if a registry answers."""
    name = run("sh", "tools/docker_base.sh", "--name").stdout.strip()
    if run("docker", "image", "inspect", name, check=False).returncode == 0:
        # Compiling takes two processor minutes, so it happens only where the compiler's image was made.
        compiler = run("docker", "image", "inspect", f"{name}-cc", check=False).returncode == 0
        script = ["tools/docker_base.sh", *(["--builder"] if compiler else [])]
        made = run("sh", *script, timeout_s=BUILD_S, check=False)  # makes the wheels anew if the lock changed
        if made.returncode == 0:
            builder = f"{name}-cc" if compiler else name
            return {"PINYON_BASE_IMAGE": name, "PINYON_BUILDER_IMAGE": builder, "PINYON_WHEELS": "deploy/wheels"}
        raise NoContainers(made.stderr.strip().splitlines()[-1])
    if run("docker", "image", "inspect", PUBLIC_BASE, check=False).returncode == 0:
        return {"PINYON_BASE_IMAGE": PUBLIC_BASE, "PINYON_BUILDER_IMAGE": PUBLIC_BASE}
    try:
        pulled = run("docker", "pull", "--quiet", PUBLIC_BASE, timeout_s=120, check=False)
        reason = (pulled.stderr.strip().splitlines() or ["?"])[-1]
        if pulled.returncode == 0:
            return {"PINYON_BASE_IMAGE": PUBLIC_BASE, "PINYON_BUILDER_IMAGE": PUBLIC_BASE}
    except AssertionError:
        reason = "the pull took too long"
    raise NoContainers(f"no base image {name} (tools/docker_base.sh makes it) and none from a registry: {reason}")


class ContainerSuite:
    """One compose project with a name of its own. Callers always call :meth:`down`."""

    def __init__(self) -> None:
        self._compose = find_compose()
        self._project = f"{OURS}{os.getpid()}_{secrets.token_hex(4)}"
        self._env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PINYON_", "COMPOSE_"))},
            **find_base(),
            "PINYON_IMAGE": IMAGE,
            "PINYON_PUBLISH_HTTP": "0",  # free ports
            "PINYON_PUBLISH_CONDUCTOR": "0",
            "PINYON_PUBLISH_LB": "0",
            "PINYON_HEALTH_INTERVAL": "5s",  # eight probes every two seconds take a whole processor
        }
        self.seconds: dict[str, float] = {}
        self._tls = tempfile.TemporaryDirectory(prefix="pinyon-test-tls-")

    def compose(self, *arguments: str, timeout_s: float = WAIT_S, check: bool = True, project: str = "") -> str:
        """Returns the output of a compose command on this project, or on another one."""
        files = ("-f", "deploy/compose.yaml", "-f", "deploy/compose.test.yaml")
        command = (*self._compose, "-p", project or self._project, *files, *arguments)
        return run(*command, timeout_s=timeout_s, env=self._env, check=check).stdout

    # -- life

    def up(self) -> None:
        """Builds and starts the suite; waits until all containers are healthy and the conductor lists all instances."""
        self._sweep()
        begun = time.monotonic()
        self.compose("build", timeout_s=BUILD_S)
        self.seconds["build"] = time.monotonic() - begun
        begun = time.monotonic()
        self.compose("up", "-d")
        self.wait_healthy()
        self.wait_listed(REGISTERED)
        self.seconds["healthy"] = time.monotonic() - begun

    def down(self) -> None:
        self._tls.cleanup()
        self.compose("down", "-v", "--remove-orphans", "-t", "5")

    def _sweep(self) -> None:
        """Removes what killed test runs left, since the engine restarts their containers forever."""
        if not PIDS.exists():
            return  # without process ids nobody can tell which runs still live
        project = '{{.Label "com.docker.compose.project"}}'
        for name in set(run("docker", "ps", "-a", "--format", project).stdout.split()):
            pid = name.removeprefix(OURS).partition("_")[0]
            if name.startswith(OURS) and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                self.compose("down", "-v", "--remove-orphans", "-t", "1", check=False, project=name)

    # -- looking

    def container(self, service: str) -> str:
        """Returns the id of a service's container, running or not."""
        label = ("--filter", f"label=com.docker.compose.project={self._project}")
        only = ("--filter", f"label=com.docker.compose.service={service}")
        listed = run("docker", "ps", "-a", "-q", *label, *only).stdout.split()
        assert len(listed) == 1, f"{service} has {len(listed)} containers"
        return listed[0]

    def inspect(self, service: str) -> dict:
        described = json.loads(run("docker", "inspect", self.container(service)).stdout)
        return described[0]

    def health(self, service: str) -> str:
        """Returns starting, healthy or unhealthy; or exited and the like."""
        state = self.inspect(service)["State"]
        return state["Health"]["Status"] if state["Status"] == "running" else state["Status"]

    def wait_healthy(self, services: Sequence[str] = SERVICES) -> None:
        """Waits until all are healthy. At the deadline it fails, with the log of unhealthy containers in the report."""
        of_ours = ("--filter", f"label=com.docker.compose.project={self._project}", "--filter", "health=healthy")
        names = ("--format", '{{.Label "com.docker.compose.service"}}')

        def all_are() -> bool:
            return set(services) <= set(run("docker", "ps", *of_ours, *names).stdout.split())

        try:
            until(f"{services} are healthy", all_are)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._unhealthy(services)}") from None

    def _unhealthy(self, services: Sequence[str]) -> str:
        """Returns Docker's state of the containers that are not healthy, with their last probes."""
        states = {service: self.inspect(service)["State"] for service in services}
        return "\n".join(
            f"{service}: {json.dumps(state)}"
            for service, state in states.items()
            if state.get("Health", {}).get("Status") != "healthy"
        )

    def published(self, service: str, port: int) -> str:
        """Returns ``host:port`` on this machine of a container's port."""
        (binding,) = self.inspect(service)["NetworkSettings"]["Ports"][f"{port}/tcp"]
        return f"{binding['HostIp']}:{binding['HostPort']}"

    def files(self, service: str) -> Path:
        """Returns a folder with the service's TLS files."""
        folder = Path(self._tls.name) / service
        if not folder.exists():
            read = {
                name: run("docker", "exec", self.container(service), "cat", f"/run/pinyon/tls/{name}")
                for name in ("ca.crt", "tls.crt", "tls.key")
            }
            folder.mkdir()
            for name, said in read.items():
                (folder / name).write_text(said.stdout)
        return folder

    def ssl_context(self) -> ssl.SSLContext:
        """Returns the context for HTTP clients of the load balancer."""
        return ssl.create_default_context(cafile=str(self.files("lb") / "ca.crt"))

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60", check=False)

    def instances(self) -> dict[str, conductor_pb2.Instance]:
        """Returns the conductor's instances, asked through its published port with the load balancer's certificate."""
        credentials = client_credentials(self.files("lb"))
        options = tls_options(peer_name(CONDUCTOR, "conductor"))
        with grpc.secure_channel(self.published("conductor", 7000), credentials, options=options) as channel:
            stub = conductor_pb2_grpc.ConductorServiceStub(channel)
            try:
                reply = stub.ListInstances(conductor_pb2.ListInstancesRequest(), timeout=10, wait_for_ready=True)
            except grpc.RpcError:
                return {}  # the conductor is starting or ending
        return {instance.info.instance_id: instance for instance in reply.instances}

    def wait_listed(self, names: frozenset[str]) -> dict[str, conductor_pb2.Instance]:
        """Waits until the conductor lists exactly these instances; returns them."""
        found = f"the conductor lists exactly {sorted(names)}"
        return until(found, lambda: listed if (listed := self.instances()).keys() == names else None)
