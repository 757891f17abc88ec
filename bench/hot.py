"""Copies of hot blocks: how evenly four store nodes are read, by periods of six seconds.

Real store nodes, a real Redis and a real conductor run on loopback. One client reads blocks one at a time, by a Zipf
distribution. Most of these reads go to one node, until the conductor has it copy what is hot. The share of the busiest
node is shown, and how many copies were made."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import Aim, Report, parser, progress
from launch.cluster import ClusterSpec, LocalCluster
from launch.scrape import Scrape
from pinyon.store.client import StoreClient
from pinyon.store.connect import open_store
from pinyon.store.kv_memory import KvMemory

NODES = 4
OBJECT = 64 << 10
OBJECTS = 192
SKEW = 1.2
PERIOD_S = 6.0
"""The time of one row, a little more than a window of a node's reads."""
PERIODS = 6
CALL_S = 10.0
METRICS = ("pinyon_kvstore_hit_blocks_total", "pinyon_kvstore_copied_objects_total")


async def _until(condition: Any, what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"never: {what}")
        await asyncio.sleep(0.02)


async def fill(store: StoreClient, memory: KvMemory, keys: list[bytes]) -> None:
    for start in range(0, OBJECTS, 16):
        part = [(key, memory.pieces(slot)) for slot, key in enumerate(keys[start : start + 16])]
        await store.put(part, OBJECT, CALL_S)

    async def listed() -> bool:
        return all(await store.exists(keys, OBJECT, CALL_S))

    await _until(listed, "all objects are listed")


async def measure(cluster: LocalCluster, seed: int, periods: int) -> list[dict[str, Any]]:
    """Returns a row for each period: reads per second, each node's share of them, and the copies so far."""
    dice = random.Random(seed)
    keys = [dice.randbytes(16) for _ in range(OBJECTS)]
    weights = [1 / (rank + 1) ** SKEW for rank in range(OBJECTS)]
    rows: list[dict[str, Any]] = []
    async with open_store(_redis_url(cluster)) as store:
        memory = store.register(bytearray(16 * OBJECT), OBJECT)
        await fill(store, memory, keys)
        before = _reads(cluster)
        for _ in range(periods):
            started, count = time.monotonic(), 0
            while time.monotonic() < started + PERIOD_S:
                (key,) = dice.choices(keys, weights)
                (arrived,) = await store.get([(key, memory.pieces(0))], OBJECT, CALL_S)
                if not arrived:
                    raise RuntimeError("an object that was put is not there")
                count += 1
            now = _reads(cluster)
            shares = [round((now[name] - before[name]) / count, 2) for name in sorted(now) if name != "copies"]
            rows.append({"reads_per_s": round(count / PERIOD_S), "shares": shares, "copies": int(now["copies"])})
            progress(f"{rows[-1]}")
            before = now
    return rows


def _redis_url(cluster: LocalCluster) -> str:
    if cluster.redis is None:
        raise RuntimeError("there is no Redis")
    return cluster.redis.url


def _reads(cluster: LocalCluster) -> Mapping[str, float]:
    names = [each.name for each in cluster.of_kind("kvstore")]
    scrape = Scrape(cluster, names, METRICS)
    return {**{name: scrape.total(METRICS[0], name) for name in names}, "copies": scrape.total(METRICS[1])}


def main() -> None:
    options = parser(__doc__).parse_args()
    periods = 3 if options.quick else PERIODS
    with tempfile.TemporaryDirectory() as folder:
        spec = ClusterSpec(prefill=0, decode=0, mixed=1, stores=NODES, engine="instant")
        with LocalCluster(spec, Path(folder)) as cluster:
            rows = asyncio.run(measure(cluster, options.seed, periods))
    busiest = [max(row["shares"]) for row in rows]
    Report(
        "hot",
        {"nodes": NODES, "objects": OBJECTS, "skew": SKEW, "seed": options.seed, "period_s": PERIOD_S},
        {"periods": rows, "busiest_share_before": busiest[0], "busiest_share_after": busiest[-1]},
        aims=[Aim("busiest_node_share", 2 / NODES, busiest[-1])],
    ).emit()


if __name__ == "__main__":
    main()
