"""Sources and destinations of KV that break and come back: who asks, who is told, who waits."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from pinyon.transfer import RegionDescriptor
from tests.integration.lb_harness import port_of
from tests.integration.worker_parts import BLOCK_TOKENS, SHORT, WAIT_S, gauge, peer_span, reference, submission

BLOCKS = 6


class Clock:
    """A real clock that can be stopped."""

    def __init__(self) -> None:
        self._stopped_s: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self._stopped_s is None else self._stopped_s

    def stop(self) -> None:
        self._stopped_s = time.monotonic()

    def go_on(self) -> None:
        self._stopped_s = None


async def lose_transfer_port(worker) -> None:
    """Makes the worker's memory unreachable, although it still grants access as before."""
    await asyncio.to_thread(worker.transfer.close)
    opened = SimpleNamespace(descriptor=lambda: RegionDescriptor(bytes(16), "cpu:0", 1 << 40))
    worker.transfer.grant = lambda *_, **__: opened
    worker.transfer.revoke_now = lambda grant: grant is opened


def prompt(number: int) -> list[int]:
    """Returns a prompt that shares nothing with others."""
    return [32 + (number * 7 + place * 3) % 90 for place in range(BLOCKS * BLOCK_TOKENS + 3)]


async def test_a_source_with_a_dead_port_costs_one_request_until_back(fleet):
    conductor = await fleet.start_conductor()
    address = f"127.0.0.1:{port_of(fleet)}"
    source = await fleet.start("mixed", "s0", listen=address)
    clock = Clock()
    p = await fleet.start("prefill", "p0", clock=clock, conductor=conductor)
    d = await fleet.start("decode", "d0")
    at_source, client = await fleet.client(source), await fleet.client(d)

    async def held_by_source(number: int) -> None:
        await at_source.answer(prompt(number), SHORT)

    async def ask(number: int):
        fetches = [peer_span(source, 0, BLOCKS)]
        answer = await client.answer(prompt(number), SHORT, prefill=p, decode=d, fetches=fetches)
        assert answer.tokens == reference(prompt(number), SHORT)
        return answer.prefill

    for number in range(3):
        await held_by_source(number)
    assert (await ask(0)).peer_tokens == BLOCKS * BLOCK_TOKENS
    assert p.load().failed_sources == frozenset()
    # It answers and grants leases, but its bytes do not arrive.
    await lose_transfer_port(source)
    clock.stop()  # otherwise a pause may be over before the test looks
    assert (await ask(1)).peer_tokens == 0
    assert p.load().failed_sources == {source.address}
    await fleet.known("p0", lambda state: state.load.failed_sources == {source.address})
    assert gauge(p, "fetch_failures_total") == 1
    assert (await ask(2)).peer_tokens == 0
    assert gauge(p, "fetch_failures_total") == 1, "it was not asked"
    clock.go_on()

    fleet.clients.remove(at_source)
    await at_source.close()
    fleet.workers.remove(source)
    await source.stop(0)
    source = await fleet.start("mixed", "s0", listen=address)
    at_source = await fleet.client(source)
    async with asyncio.timeout(WAIT_S):
        number = 3
        await held_by_source(number)
        while not (await ask(number)).peer_tokens:
            number += 1
            await held_by_source(number)
    assert p.load().failed_sources == frozenset()
    await fleet.known("p0", lambda state: not state.load.failed_sources)


async def test_a_decode_instance_that_takes_no_kv_blocks_no_others(fleet):
    clock = Clock()
    p = await fleet.start("prefill", "p0", clock=clock, active_prefills=1, push_timeout_s=5.0)
    d, other = await fleet.start("decode", "d0"), await fleet.start("decode", "d1")
    client, at_other = await fleet.client(d), await fleet.client(other)

    def ask(number: int, decode):
        return submission(prompt(number), SHORT, prefill=p, decode=decode)

    (answer,) = await client.submit(ask(0, d))
    assert (await answer.wait()).tokens == reference(prompt(0), SHORT)
    await lose_transfer_port(d)
    clock.stop()  # otherwise a pause may be over before the test looks
    p.engine.hold()
    answers = await client.submit(ask(1, d))
    await p.engine.entered()
    answers += await client.submit(ask(2, d), ask(3, d))
    (good,) = await at_other.submit(ask(4, other))
    steps = len(p.engine.steps)
    p.engine.release()
    for answer in answers:
        await answer.wait()
        assert answer.last.error.code == "UNAVAILABLE"
        assert answer.last.error.field != "prefill_instance", "it is not to blame"
    (late,) = await client.submit(ask(5, d))
    await late.wait()
    assert "took no KV" in late.last.error.message
    assert (await good.wait()).tokens == reference(prompt(4), SHORT)
    computed = sum(tokens for tokens, _ in p.engine.steps[steps:])
    assert computed == 2 * len(prompt(1)), "only one of the prompts was computed in vain"
    clock.go_on()
