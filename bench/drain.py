"""The drain of a store node under load: hit ratio before, during and after, beside a node that is killed.

Two store nodes and a Redis are processes of their own. Clients read growing conversations and put what the store
lacks. One node is drained by ``pinyon kv drain`` and stopped, or killed. The other node has room for all, or has not.
What must live are the pinned blocks, and of the others that only the drained node has the last used, as many as fit."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.drain_load import OBJECT, PromptLoad, block_content, block_key
from bench.report import Aim, Report, parser, progress
from launch.process import START_S, ServiceProcess, await_ready, end_all
from launch.redis_server import find_redis
from pinyon.api.kvstore.v1 import admin_pb2, admin_pb2_grpc
from pinyon.cli.kv_nodes import store_nodes
from pinyon.core.block_keys import pack_keys
from pinyon.runtime.channel import open_channel
from pinyon.store.client import StoreClient
from pinyon.store.connect import open_store
from pinyon_lab.pictures import Course, Courses, Mark, Picture, svg

PICTURES = Path(__file__).resolve().parent / "results"
ROOMY_MIB, TIGHT_MIB = 384, 24
CLIENTS, PAUSE_S = 4, 0.1
PINNED = 16
STEP_S, WINDOW_S = 0.25, 1.0
"""The distance of the picture's points, and the time of which each is the ratio."""
END_S = 60.0
CASES = (("room for all", ROOMY_MIB), ("room for half", TIGHT_MIB))
WAYS = ("drained", "killed")


@dataclass(frozen=True)
class DrainTimes:
    """The requests before the measurement, and the seconds before and after the node goes."""

    warm: int
    before_s: float
    after_s: float


FULL = DrainTimes(1200, 10.0, 20.0)
QUICK = DrainTimes(300, 3.0, 4.0)


@dataclass
class Departure:
    """A measurement while one node went."""

    load: PromptLoad
    began_s: float
    going_s: float = 0.0
    gone_s: float = 0.0
    ended_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        def ratio(from_s: float, until_s: float) -> float | None:
            found = self.load.ratio(from_s, until_s)
            return None if found is None else round(found, 3)

        return {
            "before_ratio": ratio(self.began_s, self.going_s),
            "during_ratio": ratio(self.going_s, self.gone_s),
            "first_2_s_ratio": ratio(self.gone_s, self.gone_s + 2.0),
            "after_ratio": ratio(self.gone_s, self.ended_s),
            "going_s": round(self.gone_s - self.going_s, 2),
            "requests": sum(each.began_s >= self.began_s for each in self.load.answered),
            "failed_calls": len(self.load.failed),
            "failures": sorted(set(self.load.failed))[:5],
            "wrong_blocks": self.load.wrong,
            "slowest_request_s": round(self.load.worst_s(self.began_s), 2),
            **self.facts,
        }

    def course(self, label: str) -> Course:
        points, at = [], WINDOW_S
        while self.began_s + at <= self.ended_s:
            found = self.load.ratio(self.began_s + at - WINDOW_S, self.began_s + at)
            if found is not None:
                points.append((at, found))
            at += STEP_S
        return Course(label, points)


async def lone_blocks(store: StoreClient, numbers: list[int], node_id: str) -> list[int]:
    """Returns the blocks that only this node has, by what Redis says."""
    located = await store.locate([block_key(number) for number in numbers], END_S)
    holders = [{each.node.node_id for each in found} for found in located]
    return [number for number, those in zip(numbers, holders, strict=True) if those == {node_id}]


async def held_by(store: StoreClient, numbers: list[int], node_id: str) -> set[int]:
    located = await store.locate([block_key(number) for number in numbers], END_S)
    return {
        number for number, found in zip(numbers, located, strict=True) if node_id in {e.node.node_id for e in found}
    }


async def pin(address: str, numbers: list[int]) -> None:
    async with open_channel(address) as channel:
        request = admin_pb2.PinRequest(keys=pack_keys([block_key(number) for number in numbers]))
        await admin_pb2_grpc.StoreAdminServiceStub(channel).Pin(request, timeout=END_S)


async def leave_drained(store: StoreClient, load: PromptLoad, redis_url: str, node: ServiceProcess) -> dict[str, Any]:
    """Drains and stops the node; returns what became of that which only this node had."""

    def by_use() -> list[int]:
        return sorted(load.used_s, key=lambda number: -load.used_s[number])

    pinned = (await lone_blocks(store, by_use(), node.name))[-PINNED:]
    await pin(node.endpoints["grpc"], pinned)
    async with store_nodes(redis_url, node.name, "", END_S) as nodes:  # what ``pinyon kv drain`` does
        rest = await lone_blocks(store, by_use(), node.name)
        began_s = time.monotonic()
        last = [each async for each in nodes.drain(nodes.chosen[0])][-1]
        drained_s = time.monotonic()
    # The node took its order after this one: what was used meanwhile may have taken the places of the last ones.
    later = await held_by(store, [each for each, used_s in load.used_s.items() if used_s >= began_s], node.name)
    lone = [*pinned, *(each for each in rest if each not in pinned)]
    must_live = lone[: max(PINNED, last.copied - len(later))]
    moved = await held_by(store, must_live, "kv-1")
    stopped_s = time.monotonic()
    node.signal(signal.SIGTERM)
    if not await asyncio.to_thread(node.wait, END_S):
        raise RuntimeError("the drained node does not end")
    return {
        "drain_s": round(drained_s - began_s, 2),
        "stop_s": round(time.monotonic() - stopped_s, 2),
        "only_there_blocks": len(lone),
        "copied_blocks": last.copied,
        "left_blocks": last.lost,
        "must_live_blocks": len(must_live),
        "pinned_lost_blocks": len(set(pinned) - moved),
        "lost_blocks": len(set(must_live) - moved),
    }


async def unreadable(store: StoreClient, numbers: list[int]) -> int:
    """Returns how many of the blocks cannot be read, or have other bytes."""
    buffer = bytearray(64 * OBJECT)
    memory, bad = store.register(buffer, OBJECT), 0
    for start in range(0, len(numbers), 64):
        part = numbers[start : start + 64]
        objects = [(block_key(number), memory.pieces(slot)) for slot, number in enumerate(part)]
        arrived = await store.get(objects, OBJECT, END_S)
        for slot, number in enumerate(part):
            bad += not arrived[slot] or buffer[slot * OBJECT : (slot + 1) * OBJECT] != block_content(number)
    return bad


async def measure(mib: int, way: str, times: DrainTimes, seed: int, logs: Path) -> Departure:
    """Lets one of two nodes of this size go under load."""
    with ExitStack() as stack:
        redis = find_redis()
        stack.callback(redis.close)
        local = "127.0.0.1:0"
        rest = ("--redis-url", redis.url, "--pool-mib", str(mib), "--listen", local, "--metrics-listen", local)
        nodes = [
            ServiceProcess(name, "services.kvstore", ["--instance-id", name, *rest], logs / f"{name}-{mib}-{way}.log")
            for name in ("kv-0", "kv-1")
        ]
        stack.callback(end_all, nodes, 10.0)
        for node in nodes:
            node.spawn()
        await_ready(nodes, time.monotonic() + START_S)
        async with open_store(redis.url, redis_timeout_s=10.0) as store:
            load = PromptLoad(store, CLIENTS, seed)
            running = asyncio.create_task(load.run())
            try:
                while len(load.answered) < times.warm:
                    if running.done():
                        running.result()
                    await asyncio.sleep(0.05)
                load.pause_s = PAUSE_S
                found = Departure(load, time.monotonic())
                await asyncio.sleep(times.before_s)
                found.going_s, known = time.monotonic(), list(load.used_s)
                if way == "drained":
                    found.facts = await leave_drained(store, load, redis.url, nodes[0])
                else:
                    found.facts = {"only_there_blocks": len(await lone_blocks(store, known, "kv-0"))}
                    await asyncio.to_thread(nodes[0].kill)
                found.gone_s = time.monotonic()
                await asyncio.sleep(times.after_s)
                found.ended_s = time.monotonic()
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
            if way == "drained" and mib == ROOMY_MIB:
                found.facts["unreadable_blocks"] = await unreadable(store, list(load.used_s))
        return found


def draw(found: dict[tuple[str, str], Departure], folder: Path) -> None:
    panels = []
    for case, mib in CASES:
        its = {way: found[case, way] for way in WAYS}
        marks = [Mark("drain, or kill", its["drained"].going_s - its["drained"].began_s)]
        marks.append(Mark("", its["drained"].gone_s - its["drained"].began_s))
        courses = [departure.course(way) for way, departure in its.items()]
        title = f"The other node has {case} ({mib} MiB)"
        panels.append(Courses(title, "time, s", "blocks found in the store", courses, marks, linear=True))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drain.svg").write_text(svg(Picture("A store node leaves under load", panels)))


def aims(found: dict[tuple[str, str], Departure]) -> list[Aim]:
    drained = {case: found[case, "drained"].result() for case, _ in CASES}
    every = list(drained.values())
    roomy = drained[CASES[0][0]]
    kept = (roomy["after_ratio"] or 0.0) / (roomy["before_ratio"] or 1.0)
    return [
        Aim("failed calls", 0, sum(each["failed_calls"] for each in every)),
        Aim("wrong blocks", 0, sum(each["wrong_blocks"] for each in every)),
        Aim("lost blocks that had to live", 0, sum(each["lost_blocks"] + each["pinned_lost_blocks"] for each in every)),
        Aim("unreadable blocks at the end, with room for all", 0, roomy["unreadable_blocks"]),
        Aim("slowest request s", 2.0, max(each["slowest_request_s"] for each in every)),
        Aim("hit ratio after / before, with room for all", 0.97, round(kept, 3), at_most=False),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pictures", type=Path, default=PICTURES, help="folder for the SVG file")
    arguments = options.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts as Ctrl-C
    times, load = QUICK if arguments.quick else FULL, os.getloadavg()[0]
    found: dict[tuple[str, str], Departure] = {}
    with tempfile.TemporaryDirectory() as logs:
        for case, mib in CASES:
            for way in WAYS:
                found[case, way] = asyncio.run(measure(mib, way, times, arguments.seed, Path(logs)))
                progress(f"{case}, {way}: {found[case, way].result()}")
    draw(found, arguments.pictures)
    config = {"seed": arguments.seed, "clients": CLIENTS, "pause_s": PAUSE_S, "object_bytes": OBJECT}
    report = Report("drain", {**config, "pool_mib": dict(CASES), "load_before": round(load, 2)})
    report.results = {case: found[case, "drained"].result() for case, _ in CASES}
    report.baseline = {case: found[case, "killed"].result() for case, _ in CASES}
    report.aims = aims(found)
    report.emit()


if __name__ == "__main__":
    main()
