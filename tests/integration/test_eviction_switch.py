"""A change of the eviction policy in a live worker and a live store node, which keep their blocks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pinyon.cli import main
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.decisions import replay_journal
from pinyon.eviction import EVICTION_POLICIES
from pinyon.eviction.day_fits import DayFits
from pinyon.eviction.fit import Fit
from pinyon.messages.request_class import class_to_proto
from tests.integration.kvstore_parts import OBJECT, Node, client_of, running_node
from tests.integration.test_worker_exactness import make_asks
from tests.integration.worker_parts import BLOCK_TOKENS, Fleet, check, run_all
from tests.store_integrity import check_table


async def admin(role: str, address: str, *changes: str) -> int:
    """Runs the admin command in a thread, as the service is on this event loop."""
    return await asyncio.to_thread(main, ["admin", role, address, *changes])


def in_force(registry: CollectorRegistry, service: str) -> set[str]:
    return {
        sample.labels["eviction"]
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"pinyon_{service}_policies_info"
    }


async def test_switching_eviction_keeps_blocks_and_is_journaled(fleet: Fleet, tmp_path: Path) -> None:
    """A pool of a few prompts evicts before and after each switch, while requests run."""
    path = tmp_path / "journal.jsonl"
    m, client = await fleet.mixed(blocks=24, max_batch=2, journal=str(path))
    pool = m.parts.cache.pool
    asks = make_asks(60, seed=5)
    choices = [*EVICTION_POLICIES.names, "workload_aware:refit_s=0.01", "lru"]
    for number, choice in enumerate(choices):
        some = asks[number * 6 : number * 6 + 6]
        running = asyncio.ensure_future(run_all(client, None, None, some))
        assert await admin("worker", m.address, f"eviction={choice}") == 0
        assert in_force(m._registry, "worker") == {choice}
        check(some, await running)
        await fleet.idle()
        prompt = [40 + number] * (3 * BLOCK_TOKENS + 1)
        sampling = SamplingParams(max_tokens=1)
        for cached in (0, 3 * BLOCK_TOKENS):
            answer = await client.answer(prompt, sampling)
            assert answer.last.usage.cached_tokens == cached, choice
            await fleet.idle()
            held = set(pool.keys())
            assert await admin("worker", m.address, f"eviction={choices[number - 1]}", "--timeout-s", "60") == 0
            assert set(pool.keys()) == held, "a block was lost"
    assert pool.eviction.evicted > 0
    fleet.workers.remove(m)
    await m.stop(0)
    with path.open(encoding="utf-8") as lines:
        seen = replay_journal(lines)
    assert seen.differences == []
    calls = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert sum(call["c"] == "switch" for call in calls) == 3 * len(choices)


@pytest.mark.parametrize("with_fits", [False, True])
async def test_what_is_learned_in_a_thread_is_in_the_journal(fleet: Fleet, tmp_path: Path, with_fits: bool) -> None:
    path, file = tmp_path / "journal.jsonl", tmp_path / "fits.json"
    file.write_text(json.dumps(DayFits({hour: {"chat/2": Fit(0.25, 5.0)} for hour in range(24)}).json()))
    eviction = "workload_aware:refit_s=0.001" + (f",fits={file}" if with_fits else "")
    m = await fleet.start("mixed", "m0", blocks=24, journal=str(path), eviction=eviction)
    assert in_force(m._registry, "worker") == {eviction}
    client = await fleet.client(m)
    asks = make_asks(40, seed=6)
    check(asks, await run_all(client, None, None, asks, request_class=class_to_proto(RequestClass("chat", 2))))
    await fleet.idle()
    if with_fits:
        assert await admin("worker", m.address, "eviction=lru") == 0
        assert await admin("worker", m.address, f"eviction={eviction}") == 0
        assert in_force(m._registry, "worker") == {eviction}
        file.unlink()  # its content is in the journal
    fleet.workers.remove(m)
    await m.stop(0)
    with path.open(encoding="utf-8") as lines:
        seen = replay_journal(lines)
    assert seen.differences == []
    calls = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    adopted = [call["r"] for call in calls if call["c"] == "adopt"]
    assert adopted
    assert all(adopted)


async def test_an_unknown_policy_changes_nothing(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    m = await fleet.start("mixed", "m0")
    assert await admin("worker", m.address, "eviction=nonsense") == 1
    said = capsys.readouterr().err
    assert f"pinyon: eviction: no eviction policy 'nonsense'; known: {', '.join(EVICTION_POLICIES.names)}" in said
    assert await admin("worker", m.address, "eviction=workload_aware:life_s=-1") == 1
    assert "life_s must be from 0" in capsys.readouterr().err
    assert in_force(m._registry, "worker") == {"lru"}


async def test_a_store_node_keeps_its_objects(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    capacity = (1 << 20) // OBJECT

    async def all_read(node: Node, numbers: list[int]) -> bool:
        return await client.fetch(node.address, numbers) == len(numbers)

    async with running_node(redis_url) as node, client_of(redis_url) as client:
        first = list(range(capacity))
        await client.stored(first)
        for choice in ("fifo", "sieve", "workload_aware", "lru"):
            assert await admin("kvstore", node.address, f"eviction={choice}") == 0
            assert in_force(node.context.registry, "kvstore") == {choice}
            check_table(node.node.table)
            assert await all_read(node, first), choice
        assert node.figure("evicted_objects_total") == 0
        await client.stored([capacity])
        assert node.figure("evicted_objects_total") == 1
        assert await admin("kvstore", node.address, "eviction=nonsense") == 1
        assert "known: lru, workload_aware" in capsys.readouterr().err
        assert in_force(node.context.registry, "kvstore") == {"lru"}
