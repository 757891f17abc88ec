"""A process with one transfer engine, driven by a test: for each JSON line on stdin, it writes one to stdout.

``main([CONFIG])`` takes a JSON object of the engine's keyword arguments in plain values. The first line on stdout says
that the engine serves. The process ends when its stdin does, and is killed when its parent dies."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

from pinyon.transfer import (
    Network,
    Nic,
    Opcode,
    Region,
    Topology,
    TransferEngine,
    TransferHandle,
    TransferLimits,
    TransferRequest,
    TransferResult,
)
from tests.segments import segment_of, text_of

_PR_SET_PDEATHSIG = 1


def make_engine(config: dict[str, Any]) -> TransferEngine:
    """Makes an engine from plain values. Arguments that are not named keep the engine's defaults."""
    arguments: dict[str, Any] = dict(config)
    host = arguments.pop("host", "127.0.0.1")
    if "limits" in arguments:
        arguments["limits"] = TransferLimits(**arguments["limits"])
    nics = [Nic(**nic) for nic in arguments.pop("nics", ())]
    topology = arguments.pop("topology", None)
    arguments["network"] = Network(nics, None if topology is None else Topology.from_json(json.dumps(topology)))
    return TransferEngine(host, **arguments)


def summary(results: list[TransferResult]) -> dict[str, Any]:
    counted = Counter((one.status.value, one.reason.name) for one in results)
    return {
        "requests": len(results),
        "final": all(one.status.is_final for one in results),
        "moved_bytes": sum(one.transferred_bytes for one in results),
        "outcomes": sorted([status, reason, count] for (status, reason), count in counted.items()),
    }


class TransferHost:
    """The commands: each ``do_*`` method is one; its arguments and its answer are JSON values."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._regions: list[Region] = []
        self._handles: list[tuple[TransferHandle, float]] = []

    def do_region(self, path: str, nbytes: int, location: str = "cpu:0") -> dict[str, Any]:
        """Registers a file's memory, which the test maps too."""
        file = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
        self._regions.append(self._engine.register_local_memory(memory, location))
        return {"region": len(self._regions) - 1, "key": self._regions[-1].key.hex()}

    def do_unregister(self, region: int) -> dict[str, Any]:
        self._engine.unregister(self._regions[region])
        return {}

    def do_descriptor(self) -> dict[str, Any]:
        return {"segment": text_of(self._engine.descriptor())}

    def do_submit(self, remote: str, batch: list[list[Any]], timeout_s: float | None = None) -> dict[str, Any]:
        """Submits ``batch``: requests as ``[READ or WRITE, region, its offset, remote key, remote offset, length]``."""
        segment = segment_of(remote)
        requests = [
            TransferRequest(Opcode[opcode], self._regions[region].key, near, segment, bytes.fromhex(key), far, length)
            for opcode, region, near, key, far, length in batch
        ]
        self._handles.append((self._engine.submit(requests), time.monotonic()))
        return {"handle": len(self._handles) - 1}

    def do_progress(self, handle: int) -> dict[str, Any]:
        return summary(self._handles[handle][0].results())

    def do_wait(self, handle: int) -> dict[str, Any]:
        waited, since = self._handles[handle]
        results = waited.wait()
        return summary(results) | {"elapsed_s": time.monotonic() - since}

    def do_stats(self) -> dict[str, Any]:
        stats = self._engine.stats()
        usable = {state.path: state.usable for _, state in self._engine.paths()}
        paths = [
            {
                "transport": one.path.transport,
                "local_nic": one.path.local_nic,
                "remote_nic": one.path.remote_nic,
                "bytes": one.nbytes,
                "failures": sum(one.failures.values()),
                "usable": usable.get(one.path, False),
            }
            for one in stats.paths
        ]
        return {"requests_now": stats.requests_now, "retries": stats.retries, "paths": paths}


def die_with_parent() -> None:
    """Lets the kernel kill this process with its parent, as a frozen child would not see the end of its stdin."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    die_with_parent()
    with make_engine(json.loads(arguments[0])) as engine:
        host = TransferHost(engine)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = getattr(host, "do_" + command.pop("op"))(**command)
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), flush=True)
