"""The processes of one side of the store benchmark: one client with its servers, and those with many clients each."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import resource
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from bench.store_crowd import CROWD, measure_crowd, work_as_crowd
from bench.store_memory import ObjectMemory
from bench.store_rows import Measurement
from bench.store_side import MakeConnector, StartServers, end_with, own_network, private_stdout


def run(start_servers: StartServers, make_connector: MakeConnector) -> None:
    """Runs the main program of a side: ``ROLE NBYTES OPTION ADDRESS PARENT``, where PARENT has started this process.

    ADDRESS is the folder for logs, or for a crowd what it is to do."""
    end_with(int(sys.argv[5]))
    role, nbytes, option, rest = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if role == CROWD:
        _run(work_as_crowd(make_connector, nbytes, option, rest))
    else:
        _run(_client(start_servers, make_connector, nbytes, option, Path(rest)))


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Runs it on uvloop where this environment has that, as pinyon's services do."""
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop").run(main)
        return
    asyncio.run(main)


async def _client(
    start_servers: StartServers, make_connector: MakeConnector, nbytes: int, option: str, logs: Path
) -> None:
    answer = private_stdout()
    isolated = own_network()
    try:
        servers = start_servers(option, logs)
    except Exception as error:
        answer({"unavailable": f"{type(error).__name__}: {error}"})
        return
    try:
        memory = ObjectMemory(nbytes, seed=1)
        connector = make_connector(servers.address, memory, option)
        store = await connector.connect()
        measurement = Measurement(store, memory, servers.pids)
        answer({"isolated": isolated, "pids": servers.pids})
        for line in sys.stdin:
            command = json.loads(line)
            kind = command.pop("do")
            try:
                if kind == CROWD:
                    answer(measure_crowd(servers.pids, servers.address, option, **command))
                else:
                    answer(await getattr(measurement, f"do_{kind}")(**command))
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})
        await store.close()
        await connector.close()
    finally:
        servers.close()
