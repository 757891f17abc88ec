"""The regional controller as a process on this machine, beside the regions that it serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from launch.process import INTERPRETER, START_S, Launch, Progress, ServiceProcess
from launch.redis_server import RedisServer
from pinyon.runtime.identity import CONTROLLER


class LocalController:
    """The controller: ``start`` → ``stop``. For a supervisor it looks like a cluster of one service.

    Its gRPC listens at ``address``. Its state is in ``folder``, so that it outlives restarts.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        log_dir: Path,
        arguments: Sequence[str] = (),
        launch: Launch = INTERPRETER,
        metrics_port: int = 0,
    ) -> None:
        self.redis: RedisServer | None = None
        self.address = address
        host = address.rpartition(":")[0]
        own = (
            *("--instance-id", CONTROLLER, "--listen", address, "--http-listen", f"{host}:0"),
            *("--metrics-listen", f"{host}:{metrics_port}", "--state-file", str(folder / "controller.json")),
        )
        self._service = ServiceProcess(
            CONTROLLER, "services.controller", [*own, *arguments], log_dir / f"{CONTROLLER}.log", launch
        )
        self.services = {CONTROLLER: self._service}

    def start(self, tls_dir: Path | None, progress: Progress = lambda _: None) -> None:
        """Starts it, with TLS if its ``tls_dir`` is given. Raises :class:`PinyonError` if it does not serve."""
        if tls_dir is not None:
            self._service.arguments += ["--tls-dir", str(tls_dir)]
        self._service.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._service.spawn()
        self._service.wait_ready(time.monotonic() + START_S)
        progress(f"{CONTROLLER} {' '.join(f'{key}={value}' for key, value in self._service.endpoints.items())}")

    def restart(self, name: str = CONTROLLER, wait: bool = True) -> ServiceProcess:
        """Starts it again at its address; without ``wait`` the caller waits. Metrics may move to a free port."""
        self._service.start_again(START_S if wait else None)
        return self._service

    def stop(self) -> None:
        """Kills it at once: nothing is kept, and no load balancer should replace others that end now."""
        self._service.kill()
