"""A worker's load reports to load balancers: each request that waits for room counts once, and reports come in time."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import grpc

from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.request import SamplingParams
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions
from services.worker.app import Worker
from services.worker.decode.load_news import HEARTBEAT_S
from tests.forks import until_stopped
from tests.integration.lb_harness import port_of
from tests.integration.worker_parts import (
    OTHER,
    PROMPT,
    SHORT,
    WAIT_S,
    Fleet,
    Gate,
    LbClient,
    ended,
    gauge,
    submission,
    until,
    worker_process,
)

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
INTERVAL_MS = 10


class Listener:
    """A load balancer that asks for load reports."""

    def __init__(self, client: LbClient) -> None:
        self.client = client

    async def ask(self) -> Listener:
        await self.client.call.write(worker_pb2.SessionRequest(load_interval_ms=INTERVAL_MS))
        return self

    @property
    def loads(self) -> list[worker_pb2.Load]:
        return [message.load for message in self.client.messages if message.HasField("load")]

    async def told(self, **expected) -> worker_pb2.Load:
        """Waits until the latest report has these values; returns it."""

        def says() -> bool:
            last = self.loads[-1:]
            return bool(last) and all(getattr(last[0], name) == value for name, value in expected.items())

        try:
            await until(says)
        except TimeoutError:
            raise AssertionError(f"expected {expected}, told {self.loads[-3:]}") from None
        return self.loads[-1]

    async def heard(self, count: int) -> worker_pb2.Load:
        """Returns the report with this number; more may have arrived already."""
        await until(lambda: len(self.loads) >= count)
        return self.loads[count - 1]


async def listener(fleet: Fleet, worker: Worker) -> Listener:
    return await Listener(await fleet.client(worker)).ask()


async def watched(fleet: Fleet, **settings: Any) -> tuple[Worker, Listener]:
    """Starts an instance; returns it with a load balancer that asks for reports."""
    worker = await fleet.start("mixed", "m0", load_interval_s=0.01, **settings)
    return worker, await listener(fleet, worker)


def ask(worker: Worker, prompt=PROMPT, sampling=LONG, prefill: Worker | None = None):
    return submission(prompt, sampling, prefill=prefill or worker, decode=worker)


def waiting(worker: Worker) -> int:
    return int(gauge(worker, "waiting_for_room"))


async def test_who_does_not_ask_is_told_nothing(fleet):
    m, client = await fleet.mixed(load_interval_s=0.01)
    (answer,) = await client.submit(ask(m))
    await answer.wait()
    assert not any(message.HasField("load") for message in client.messages)
    assert all(message.updates for message in client.messages)


async def test_a_roomy_one_while_prompts_are_computed_and_decoded(fleet):
    m, lb = await watched(fleet, max_batch=8, active_prefills=1)
    first = await lb.heard(1)
    assert (first.seq, first.pending, first.running, first.room, first.max_batch, first.received) == (1, 0, 0, 8, 8, 0)
    m.engine.hold()
    answers = await lb.client.submit(ask(m), ask(m, OTHER), ask(m, PROMPT * 2))
    told = await lb.told(received=3, running=3)
    await until(lambda: (gauge(m, "queued_prefills"), gauge(m, "pending_requests")) == (2, 3))
    assert (told.pending, told.room) == (0, 5), "who waits for the engine does not wait for room"
    assert told.pending_prefill_tokens > 0
    m.engine.release()
    await ended(answers)
    told = await lb.told(running=0, pending=0)
    assert (told.received, told.pending_prefill_tokens) == (3, 0)
    assert [load.seq for load in lb.loads] == list(range(1, len(lb.loads) + 1))


async def test_requests_beyond_the_batch_or_beyond_all_places_wait(fleet):
    """Two are decoded at once; four have KV memory at once."""
    m, lb = await watched(fleet, max_batch=2)
    m.engine.hold()
    answers = await lb.client.submit(*[ask(m, PROMPT, LONG) for _ in range(2)])
    told = await lb.told(running=2)
    assert (told.pending, told.room) == (0, 0)
    answers += await lb.client.submit(*[ask(m, OTHER, LONG) for _ in range(5)])
    await lb.told(running=2, pending=5, received=7, room=0)
    await until(lambda: gauge(m, "room_waiters") == 3)
    await lb.client.cancel(answers[-1])
    await lb.told(pending=4)
    await lb.client.cancel(answers[2])  # it keeps its memory until the step is over; then a waiting request gets it
    await answers[2].wait()
    await lb.told(pending=4, running=2)
    m.engine.release()
    await ended(answers)
    await lb.told(pending=0, running=0, room=2)


async def test_full_memory(fleet):
    m, lb = await watched(fleet, blocks=20)
    m.engine.hold()
    (first,) = await lb.client.submit(ask(m))
    await m.engine.entered()
    # One block in a hundred is reserved for running requests. Before a request asks for memory, its need is unknown.
    await lb.told(running=1, room=(20 - 6 - 1) // 6)
    others = await lb.client.submit(ask(m, OTHER * 3, SHORT), ask(m, [1 + token for token in OTHER] * 3, SHORT))
    await lb.told(pending=2, running=1, room=0)
    await until(lambda: waiting(m) == 2)
    await lb.client.cancel(others[0])
    await lb.told(pending=1, running=1, room=0)
    m.engine.release()
    for answer in (first, *others):
        await answer.wait()
    await lb.told(pending=0, running=0)


async def test_one_that_gave_way_waits_once(fleet):
    """Two requests that need 13 blocks each in the end, in a pool of 14."""
    m, lb = await watched(fleet, blocks=14)
    together: list[bool] = []

    def at(decodes) -> bool:
        together.append(len(decodes) == 2)
        return any(together) and len(decodes) == 1

    gate = Gate(at, m.engine)
    m.engine.hold()
    answers = await lb.client.submit(ask(m), ask(m, OTHER))
    m.engine.release()
    await gate.reached()
    assert gauge(m, "preemptions_total") == 1
    told = await lb.told(pending=1, running=1, received=2)
    assert told.room == 0
    await lb.client.cancel(answers[1])
    await lb.told(pending=0, running=1)
    gate.open()
    await answers[0].wait()
    await lb.told(pending=0, running=0)


async def test_prompts_computed_elsewhere_take_no_place(fleet):
    p = await fleet.start("prefill", "p0", blocks=8, load_interval_s=0.01)
    d = await fleet.start("decode", "d0", max_batch=1, load_interval_s=0.01)
    at_d, at_p = await listener(fleet, d), await listener(fleet, p)
    p.engine.hold()
    await at_d.client.submit(ask(d, PROMPT, SHORT, prefill=p))
    await p.engine.entered()
    await at_d.client.submit(ask(d, OTHER, SHORT, prefill=p))
    told = await at_d.told(running=2)
    assert told.pending == 0
    await at_p.told(pending=1, running=1, room=0)
    # Two more in the queue, where the one without memory keeps them; of four, two have no slot at d.
    answers = await at_d.client.submit(*[ask(d, PROMPT[n:], SHORT, prefill=p) for n in (1, 2)])
    await at_d.told(running=2, pending=2, received=4)
    await until(lambda: waiting(p) == 1)
    p.engine.release()
    for answer in at_d.client.answers.values():
        await answer.wait()
    assert len(answers) == 2
    await at_d.told(running=0, pending=0)
    await at_p.told(running=0, pending=0)


async def test_one_that_drains_has_no_room_and_says_so(fleet):
    m, lb = await watched(fleet)
    assert (await lb.told(draining=False)).room > 0
    m._set_draining(True)
    assert (await lb.told(draining=True)).room == 0
    (refused,) = await lb.client.submit(ask(m))
    await refused.wait()
    await lb.told(received=1, running=0)
    m._set_draining(False)
    assert (await lb.told(draining=False)).room > 0


async def test_the_conductor_is_told_too(fleet):
    address = await fleet.start_conductor()
    m, client = await fleet.mixed(max_batch=1, conductor=address)
    await fleet.known("m0", lambda state: state.load.room == 1)
    m.engine.hold()
    answers = await client.submit(ask(m), ask(m, OTHER))
    state = await fleet.known("m0", lambda state: state.load.waiting_for_room == 1)
    assert state.load.room == 0
    m.engine.release()
    await ended(answers)


async def test_another_session_hears_of_what_it_did_not_send(fleet):
    m = await fleet.start("mixed", "m0", max_batch=1, load_interval_s=0.01)
    sender, lb = await fleet.client(m), await listener(fleet, m)
    await lb.heard(1)
    m.engine.hold()
    answers = await sender.submit(ask(m), ask(m, OTHER))
    await lb.told(pending=1, running=1, received=0)
    m.engine.release()
    await ended(answers)
    await lb.told(pending=0, running=0)


async def test_load_balancers_share_the_room(fleet):
    """A load balancer that gets no reports, so cannot push by them, has no share; one that leaves frees its share."""
    m = await fleet.start("mixed", "m0", max_batch=8, load_interval_s=0.01)
    await fleet.client(m)
    one = await listener(fleet, m)
    await one.told(room=8)
    two, three = await listener(fleet, m), await listener(fleet, m)
    for each in (one, two, three):
        await each.told(room=2)
    m.engine.hold()
    answers = await two.client.submit(*[ask(m, PROMPT, LONG) for _ in range(6)])
    for each in (one, two, three):
        await each.told(running=6, room=1)
    answers += await one.client.submit(ask(m), ask(m))
    for each in (one, two, three):
        await each.told(running=8, room=0)
    m.engine.release()
    await ended(answers)
    await two.client.close()
    await three.client.close()
    await one.told(running=0, room=8)


async def test_nothing_changes_and_still_it_is_told(fleet):
    _, lb = await watched(fleet)
    assert (await lb.heard(3)).seq == 3
    assert all(load.room == lb.loads[0].room for load in lb.loads)


async def test_a_load_balancer_hears_of_those_it_watches(fleet):
    """The load balancer has sent them nothing. An instance that ends is lost once, and heard again when it returns."""
    listen = f"127.0.0.1:{port_of(fleet)}"
    m = await fleet.start("mixed", "m0", max_batch=4, load_interval_s=0.01, listen=listen)
    heard: list[tuple[str, worker_pb2.Load, int]] = []
    lost: list[str] = []
    sessions = WorkerSessions(1 << 16, lambda *told: heard.append(told), lost.append)
    try:
        sessions.keep({m.address: "m0"}, watch=True)
        await until(lambda: heard)
        assert (heard[0][0], heard[0][1].room, heard[0][2]) == (m.address, 4, 0)
        assert len(sessions) == 1
        m.engine.hold()
        stream, message = await sessions.open(m.address, "m0", 1024, 0.0)
        filled = ask(m, PROMPT, SHORT)
        filled.stream_id = message.stream_id
        message.CopyFrom(filled)
        await until(lambda: heard[-1][1].running == 1)
        assert (heard[-1][1].received, heard[-1][2], len(sessions)) == (1, 0, 1)
        m.engine.release()
        while not stream.ended:
            await stream.take()
        await until(lambda: heard[-1][1].running == 0)
        await fleet.idle()
        fleet.workers.remove(m)
        await m.stop(0)
        await until(lambda: lost)
        before = len(heard)
        await fleet.start("mixed", "m0", max_batch=2, load_interval_s=0.01, listen=listen)
        await until(lambda: len(heard) > before)
        assert (heard[-1][1].room, heard[-1][1].received, lost) == (2, 0, [m.address])
    finally:
        await sessions.close()


async def test_a_frozen_process_is_silent_and_speaks_again():
    """A load balancer takes an instance for dead after twice the longest pause."""
    async with (
        worker_process("--instance-id", "m0", "--pool-blocks", "64") as (process, address),
        grpc.aio.insecure_channel(address) as channel,
        asyncio.timeout(WAIT_S),
    ):
        call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
        await call.write(worker_pb2.SessionRequest(load_interval_ms=100))
        assert (await call.read()).load.seq == 1
        process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(until_stopped, process.pid)
        done = True
        while done:  # messages on their way may still arrive; a frozen process adds none
            reading = asyncio.ensure_future(call.read())
            done, _ = await asyncio.wait((reading,), timeout=2 * HEARTBEAT_S)
        process.send_signal(signal.SIGCONT)
        assert (await reading).HasField("load")
        call.cancel()
