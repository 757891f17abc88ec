"""Live services write down their decisions; a replay decides the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from pinyon.api.common.v1 import common_pb2
from pinyon.core.journal import Codec, Replay
from pinyon.core.request import SamplingParams
from pinyon.decisions import JOURNAL_TYPES, replay_journal
from tests.integration.lb_harness import running_lb, spin
from tests.integration.test_worker_exactness import make_asks
from tests.integration.worker_parts import Fleet, check, ended, run_all, submission
from tests.queue_integrity import check_queue
from tests.worker_integrity import check_admission, check_prompts


def replayed(path: Path) -> Replay:
    with path.open(encoding="utf-8") as lines:
        seen = replay_journal(lines)
    assert seen.differences == []
    return seen


async def test_a_pair_of_workers_decides_the_same_again(fleet: Fleet, tmp_path: Path) -> None:
    """Pools that hold a few prompts only: evictions, waits for room, and requests that are cancelled meanwhile."""
    paths = {role: tmp_path / f"{role}.jsonl" for role in ("prefill", "decode")}
    settings = {"blocks": 24, "prefill_chunk_tokens": 16, "max_batch": 2}
    p = await fleet.start("prefill", "p0", journal=str(paths["prefill"]), **settings)
    d = await fleet.start("decode", "d0", journal=str(paths["decode"]), **settings)
    client = await fleet.client(d)
    asks = make_asks(40, seed=24)
    gone = await client.submit(*(submission(prompt, sampling, prefill=p, decode=d) for prompt, sampling in asks[:5]))
    for answer in gone[::2]:
        await client.cancel(answer)
    check(asks, await run_all(client, p, d, asks))
    await ended(gone)
    await fleet.idle()
    for worker in (d, p):
        fleet.workers.remove(worker)
        await worker.stop(0)
    for role, path in paths.items():
        assert path.stat().st_mode & 0o077 == 0, "block keys are nobody else's business"
        seen = replayed(path)
        assert seen.calls > 100, role
        check_admission(seen.modules["admission"])
        check_prompts(seen.modules["prompts"])
        assert seen.modules["admission"].waiting == 0  # type: ignore[attr-defined]


async def test_journals_name_no_user_no_session_and_no_cache_salt(fleet: Fleet, tmp_path: Path) -> None:
    paths = [tmp_path / "prefill.jsonl", tmp_path / "decode.jsonl"]
    p = await fleet.start("prefill", "p0", journal=str(paths[0]))
    d = await fleet.start("decode", "d0", journal=str(paths[1]))
    client = await fleet.client(d)
    asked = submission([7] * 40, SamplingParams(max_tokens=4, ignore_eos=True), prefill=p, decode=d)
    asked.request_class.MergeFrom(
        common_pb2.RequestClass(kind="chat", turn=1, user="anna", session="diary", cache_salt="grain", tenant="acme")
    )
    (answer,) = await client.submit(asked)
    await answer.wait()
    await fleet.idle()
    for worker in (d, p):
        fleet.workers.remove(worker)
        await worker.stop(0)
    for path in paths:
        assert replayed(path).calls
        text = path.read_text()
        assert "acme" in text
        assert [secret for secret in ("anna", "diary", "grain") if secret in text] == []


async def test_the_batching_policy_sees_what_its_batches_bring(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    m, client = await fleet.mixed(journal=str(path), prefill_chunk_tokens=16)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    for answer in await client.submit(*(submission([number] * 40, sampling) for number in range(1, 4))):
        await answer.wait()
    await fleet.idle()
    fleet.workers.remove(m)
    await m.stop(0)
    replayed(path)
    calls = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    codec = Codec(JOURNAL_TYPES)
    steps = [codec.decode(call["a"][0]) for call in calls if (call["m"], call["c"]) == ("admission", "observe")]
    assert sum(step.prefill_tokens for step in steps) == 3 * 40
    assert sum(step.decoded for step in steps) == 3 * 7, "the first token comes with the prompt"
    assert all(0 < step.seconds < 60 for step in steps)


async def test_a_load_balancer_decides_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "lb.jsonl"
    limits = {"tenant_rpm": 600, "tenant_tpm": 100_000}
    async with running_lb(journal=str(path), in_flight_limit=2, queue_limit=2, **limits) as bench:
        for worker in bench.workers:
            worker.go.clear()
        asked = [asyncio.ensure_future(bench.complete(f"ask {number}", max_tokens=5)) for number in range(12)]
        await spin(lambda: sum(each.done() for each in asked) == 8)
        for worker in bench.workers:
            worker.go.set()
        replies = await asyncio.gather(*asked)
        await bench.idle()
    assert {reply.status for reply in replies} == {200, 429}
    seen = replayed(path)
    entered = sum(reply.status == 200 for reply in replies)
    # Each request asks for its rate and a place. One with a place takes tokens, enters, and leaves, with all tokens
    # used.
    assert seen.calls == 2 * len(replies) + 3 * entered
    assert seen.modules["queue"].in_flight == 0  # type: ignore[attr-defined]


async def test_the_choices_of_a_call_are_decided_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "lb.jsonl"
    async with running_lb(journal=str(path), in_flight_limit=3, queue_limit=8) as bench:
        replies = await asyncio.gather(*(bench.complete("ask", max_tokens=5, n=5) for _ in range(4)))
        await bench.idle()
    assert [len(reply.json["choices"]) for reply in replies] == [5] * 4
    queue = replayed(path).modules["queue"]
    check_queue(queue)  # type: ignore[arg-type]
    assert (queue.in_flight, queue.queued) == (0, 0)  # type: ignore[attr-defined]
