"""Stock vLLM servers with pinyon's connector, as processes of a local suite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from launch.process import ROOT, Process, Progress, ServiceProcess
from pinyon.core.errors import Unavailable
from pinyon.runtime.process import child_environment

VERSION = os.environ.get("PINYON_ENGINE_VERSION", "0.32.0")
FOLDER = ROOT / ".cache" / "vllm"
START_S = 300.0
"""The time within which vLLM must serve after its start; 30 to 90 s are usual on a CPU."""
SAY_S = 10.0
ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "4096"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "4096", "--kv-cache-memory-bytes", str(256 << 20)),
)
"""The arguments for a small model on a CPU; later ones win."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}

_direct = build_opener(ProxyHandler({}))
"""Asks no proxy that the environment names."""


def vllm_python() -> Path:
    """Returns the Python that has vLLM. Raises :class:`Unavailable` if there is none yet."""
    python = FOLDER / VERSION / "venv" / "bin" / "python"
    if not (FOLDER / VERSION / "stamp").exists():
        reason = FOLDER / VERSION / "reason"
        why = reason.read_text().strip() if reason.exists() else "it was not installed: tools/vllm.sh does so"
        raise Unavailable(f"vLLM {VERSION} is not there: {why}")
    return python


def prepare() -> None:
    """Installs vLLM where it is not there yet, which takes minutes and says so. Raises :class:`Unavailable`."""
    if subprocess.run(["sh", str(ROOT / "tools" / "vllm.sh")], stdin=subprocess.DEVNULL).returncode:
        vllm_python()
        raise Unavailable("vLLM could not be installed")


def small_checkpoint(name: str = "tiny", **shape: int) -> Path:
    """Returns a checkpoint's folder, which is made if it is not there. Raises :class:`Unavailable`."""
    folder = FOLDER / name
    if not (folder / "model.safetensors").exists():
        numbers = [f"{key}={value}" for key, value in shape.items()]
        command = [str(vllm_python()), "-m", "launch.vllm_checkpoint", str(folder), *numbers]
        made = subprocess.run(
            command, env=child_environment(ROOT, os.getpid()), capture_output=True, text=True, timeout=START_S
        )
        if made.returncode:
            raise Unavailable(f"the checkpoint could not be made: {made.stderr.strip()[-500:]}")
    return folder


class VllmServer(ServiceProcess):
    """One ``vllm serve`` with the connector. Its processes are killed and frozen together."""

    def __init__(
        self,
        name: str,
        model: Path,
        served_name: str,
        host: str,
        port: int,
        connector: Mapping[str, object] | None,
        log_path: Path | None,
        more: Sequence[str] = (),
        say: Progress = lambda _: None,
        python: Path | None = None,
    ) -> None:
        """Takes the settings of the connector, or None for a server without it; and a Python that has vLLM and more."""
        super().__init__(name, "vllm", [], log_path)
        self.start_s = START_S
        self.url = f"http://{host}:{port}"
        self._say, self._spawned_s, self._said_s = say, 0.0, 0.0
        self._python = python
        transfer = {
            "kv_connector": "PinyonConnector",
            "kv_connector_module_path": "pinyon.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"instance_id": name, **(connector or {})},
        }
        self.arguments = [
            *("serve", str(model), "--served-model-name", served_name, "--host", host, "--port", str(port)),
            *ARGUMENTS,
            *(() if connector is None else ("--kv-transfer-config", json.dumps(transfer))),
            *more,
        ]
        self._http = f"{host}:{port}"

    def spawn(self) -> None:
        self._spawned_s = self._said_s = time.monotonic()
        self.endpoints = {}
        environment = child_environment(ROOT, os.getpid()) | ENVIRONMENT
        environment.pop("PYTHONSAFEPATH", None)  # vLLM starts its processes by files beside it
        with nullcontext() if self.log_path is None else self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [str(self._python or vllm_python()), "-m", "launch.vllm_main", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def serving(self) -> bool:
        return self.alive and bool(self.endpoints)

    def announced(self) -> bool:
        if not self.alive:
            raise Unavailable(f"{self} ended while starting{self.log_tail()}")
        try:
            with _direct.open(f"{self.url}/health", timeout=1.0):
                self.endpoints = {"http": self._http}
                return True
        except (URLError, OSError):
            now_s = time.monotonic()
            if now_s - self._said_s >= SAY_S:
                self._said_s = now_s
                self._say(f"{self.name}: vLLM is starting, {now_s - self._spawned_s:.0f} s ...")
            return False

    def start_again(self) -> None:
        Process.start_again(self)

    def signal(self, number: int) -> None:
        """Sends a signal: SIGTERM to the server, which ends the others; what cannot be caught, to all of them."""
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
            if self.process is not None and self.alive:
                os.killpg(self.process.pid, number)
        else:
            super().signal(number)
