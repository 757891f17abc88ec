"""The row with many connections: several processes of one side, each with hundreds of clients."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.store_memory import PAGE, Item, ObjectMemory
from bench.store_side import GET, PUT, MakeConnector, Store, cpu_s, private_stdout

CROWD = "crowd"
CLIENTS_BYTES = 1536 << 20
"""The memory that the clients of one process may take: a client of Mooncake takes 25 MiB."""
ANSWER_S = 30.0
"""The time beyond its work within which a connection must have answered."""


def measure_crowd(
    pids: dict[str, int], address: Any, option: str, *, processes: int, connections: int, size: int, seconds: float,
    open_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Returns the figures of many connections, from several processes, each putting or getting one object at a time."""
    module = Path(sys.argv[0]).stem
    children = []
    for number in range(processes):
        each = connections // processes + (number < connections % processes)
        task = {"address": address, "count": each, "size": size, "open_s": open_s, "first": (number + 1) << 32}
        arguments = [CROWD, str(each * size), option, json.dumps(task), str(os.getpid())]
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", f"bench.{module}", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
    try:
        opened = [_answer(child) for child in children]
        figures: dict[str, Any] = {
            "open": sum(each["open"] for each in opened),
            "stopped_by": next((each["error"] for each in opened if each["error"]), ""),
            "open_s": round(max(each["seconds"] for each in opened), 1),
        }
        for op in (PUT, GET):
            before = cpu_s(list(pids.values()))
            for child in children:
                assert child.stdin is not None
                child.stdin.write(json.dumps({"op": op, "seconds": seconds}).encode() + b"\n")
                child.stdin.flush()
            said = [_answer(child) for child in children]
            spent = [each for answer in said for each in answer["spent_us"]]
            figures[op] = {
                "spent_us": spent,
                "seconds": max(each["seconds"] for each in said),
                "client_cpu_s": sum(each["cpu_s"] for each in said),
                "server_cpu_s": cpu_s(list(pids.values())) - before,
                "failed": sum(each["failed"] for each in said),
                "failure": next((each["failure"] for each in said if each["failure"]), ""),
                "wrong": sum(each["wrong"] for each in said),
            }
        return figures
    finally:
        for child in children:
            child.kill()
            child.wait()


def _answer(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a process with many clients ended with status {child.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def resident_bytes() -> int:
    """Returns the memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass(slots=True)
class _Member:
    store: Store
    item: Item
    number: int
    ready: bool = False
    """True once it got an object."""


async def work_as_crowd(make_connector: MakeConnector, nbytes: int, option: str, task: dict[str, Any]) -> None:
    answer = private_stdout()
    memory = ObjectMemory(max(nbytes, PAGE), seed=1)
    connector = make_connector(task["address"], memory, option)
    members: list[_Member] = []
    started, error, before = time.perf_counter(), "", resident_bytes()
    while len(members) < task["count"] and not error:
        if time.perf_counter() - started > task["open_s"]:
            error = f"the {task['open_s']:g} s for opening them"
            break
        if resident_bytes() - before > CLIENTS_BYTES:
            error = f"the {CLIENTS_BYTES >> 20} MiB of memory for the clients of a process"
            break
        number = task["first"] + (len(members) << 16)
        try:
            store = await connector.connect(many=True)
            item = Item(store.name(number), number, len(members) * task["size"])
            memory.stamp([item], task["size"])
            await asyncio.wait_for(store.put([item], task["size"]), ANSWER_S)
            members.append(_Member(store, item, number))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    answer({"open": len(members), "error": error, "seconds": time.perf_counter() - started})
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer(await _phase(members, memory, task["size"], **json.loads(line)))


async def _phase(
    members: Sequence[_Member], memory: ObjectMemory, size: int, op: str, seconds: float
) -> dict[str, Any]:
    """Lets each client put fresh objects, or get its last one, one at a time until the time is up."""
    spent: list[float] = []
    failures: list[str] = []
    started, cpu = time.perf_counter(), time.process_time()
    until = started + seconds

    async def work(member: _Member) -> None:
        store = member.store
        while (begun := time.perf_counter()) < until:
            if op == PUT:
                member.number += 1
                item = Item(store.name(member.number), member.number, member.item.offset)
                memory.stamp([item], size)
                begun = time.perf_counter()
            else:
                item = member.item
            try:
                call = store.put if op == PUT else store.get
                await asyncio.wait_for(call([item], size), seconds + ANSWER_S)
            except Exception as failure:
                failures.append(f"{type(failure).__name__}: {failure}")
                return
            member.item, member.ready = item, member.ready or op == GET
            spent.append(round((time.perf_counter() - begun) * 1e6, 1))

    await asyncio.gather(*map(work, members))
    took_s, cpu = time.perf_counter() - started, time.process_time() - cpu
    wrong = 0
    for member in members:
        if op == PUT:
            await member.store.settle([member.item], size)
        elif member.ready:
            member.store.land([member.item], size)
            wrong += memory.wrong([member.item], size)
    return {
        "spent_us": spent,
        "seconds": took_s,
        "cpu_s": cpu,
        "failed": len(failures),
        "failure": failures[0] if failures else "",
        "wrong": wrong,
    }
