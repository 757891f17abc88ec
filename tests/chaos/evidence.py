"""A folder in which a run leaves what explains it: the services' logs, a timeline, the metrics, how to repeat it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from launch.cluster import LocalCluster
from tests.chaos.traffic import Record

LOG_BYTES = 4 << 20
"""The largest number of bytes kept of one service's log per fault; the end is kept."""
SCRAPE_S = 5.0


def machine() -> dict[str, object]:
    """Returns the machine on which the figures were measured, and its load."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "processor": model,
        "processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1_min": round(os.getloadavg()[0], 1),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


class Evidence:
    """The ``folder`` of a run: ``logs`` while it lasts, and a folder for each fault that needs an explanation."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.kept = False
        self._seed = seed
        self._offsets: dict[Path, int] = {}
        self._events: list[tuple[float, str]] = []

    def __enter__(self) -> Evidence:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """Deletes the logs unless the run failed or evidence was kept."""
        if not self.kept and (kind is None or not issubclass(kind, Exception)):
            shutil.rmtree(self.logs, ignore_errors=True)

    def begin(self) -> None:
        """Begins a new fault, to which all later log lines belong."""
        self._offsets = {path: path.stat().st_size for path in self.logs.rglob("*.log")}
        self._events = []

    def note(self, what: str) -> None:
        self._events.append((time.monotonic(), what))

    def keep(self, name: str, cluster: LocalCluster, records: Iterable[Record], facts: Mapping[str, object]) -> Path:
        """Writes down the fault since :meth:`begin`."""
        self.kept = True
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        about = {"seed": self._seed, "command": " ".join(sys.argv), "machine": machine(), "time": time.ctime(), **facts}
        (folder / "about.json").write_text(json.dumps(about, indent=2, default=str) + "\n")
        lines: list[tuple[float, dict[str, object]]] = [(at_s, {"event": what}) for at_s, what in self._events]
        lines += [(record.started_s, {"request": asdict(record)}) for record in records]
        lines.sort(key=lambda line: line[0])
        with (folder / "timeline.jsonl").open("w") as file:
            for at_s, what in lines:
                file.write(json.dumps({"at_s": round(at_s, 4), **what}) + "\n")
        for path in sorted(self.logs.rglob("*.log")):
            begin = max(self._offsets.get(path, 0), path.stat().st_size - LOG_BYTES)
            with path.open("rb") as log:
                log.seek(begin)
                (folder / path.name).write_bytes(log.read(LOG_BYTES))
        for service in cluster.services.values():
            (folder / f"{service.name}.metrics").write_text(_metrics(service.endpoints.get("metrics", "")))
        return folder


def _metrics(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_S) as reply:
            return str(reply.read().decode(errors="replace"))
    except OSError as error:
        return f"not to be had: {error}\n"
