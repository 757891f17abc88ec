"""Processes that are killed, frozen and told to end while they work: tokens stay exact, waits bounded, nothing is left.

The processes and signals are real. The expected tokens come from an engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from pinyon.messages.error import ERROR_METADATA_KEY
from pinyon.runtime.interceptors import error_from_rpc
from tests.chaos.balancer import Balancer
from tests.chaos.victims import Pace, strike
from tests.cluster.fault_tools import (
    WORKERS,
    Clients,
    again,
    busiest,
    clients_of,
    exit_status,
    generating,
    http_accepts,
    kill_redis,
    known,
    lookup,
    make_asks,
    reads,
    restart,
    start_redis,
    used,
    value,
    whole,
)
from tests.cluster.observe import wait_idle
from tests.cluster.reference import BLOCK_TOKENS, Answer, Ask, Reference, random_sampling, send, text_tokens
from tests.cluster.specs import cluster_spec, frozen
from tests.forks import forked
from tests.waiting import WAIT_S, eventually

SEED = 4711
TRIES = 5
LONG = 480
"""Tokens of an answer, whose decoding lasts while the test finds the busiest instance."""
WORK = {
    "prefill": ("pinyon_worker_running_prefills", (16, 1000, 4)),
    "decode": ("pinyon_worker_running_requests", (3, 120, LONG)),
}
"""The gauge of each kind's work, and requests that keep it busy: their number, prompt tokens and answer tokens."""
KINDS = pytest.mark.parametrize("kind", WORK)
ENDED = 150
"""The least number of requests in the mix of faults."""
THINK_S = 0.2
"""The pause between two requests of a client in the mix of faults, which tests faults, not the processors' speed."""


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of 2 prefill, 2 decode and 1 store node. Pools hold eight long requests, so blocks are soon reused."""
    # Requests may finish even on a much slower machine: the time for that is not under test.
    drain = ("--drain-s", str(WAIT_S / 2))
    extra = {"conductor": ("--inflight-unclaimed-s", "3"), "prefill": drain, "decode": drain, "lb": drain}
    spec = cluster_spec(pool_blocks=256, extra=extra)
    with LocalCluster(spec, tmp_path_factory.mktemp("fault-logs"), forked.with_small_model) as running:
        yield running


@pytest.fixture
def random_(request: pytest.FixtureRequest) -> random.Random:
    seed = f"{SEED} {request.node.name}"
    print(f"seed {seed!r}")
    return random.Random(seed)


@pytest.fixture
async def clients(fragile: LocalCluster, small_reference: Reference) -> AsyncIterator[Clients]:
    async with clients_of(fragile, small_reference) as clients:
        yield clients
    # These repair the cluster for the next test if this one failed.
    for name, service in fragile.services.items():
        service.signal(signal.SIGCONT)
        if not service.alive:
            await restart(fragile, name)
    await known(fragile)


# -- one fault at a time


async def begun(clients: Clients, random_: random.Random, kind: str) -> list[Ask]:
    """Starts requests that keep instances of this kind busy; answers under way have their first tokens then."""
    asks = make_asks(random_, *WORK[kind][1])
    answers = clients.start(asks)
    if kind == "decode":
        await generating(answers)
    return asks


async def killed_at_work(fragile, clients, random_, kind, counter) -> tuple[str, list[Ask]]:
    """Kills the busiest instance of this kind; its requests must stay exact. Returns its name and the requests.

    It repeats until ``counter`` of the load balancer shows that a request ran there. On a busy machine all requests may
    end between the look and the signal."""
    for _ in range(TRIES):
        before = await value(fragile, "lb-0", counter)
        asks: list[Ask] = []

        async def more(asks: list[Ask] = asks) -> None:
            asks += await begun(clients, random_, kind)

        victim = await busiest(fragile, kind, WORK[kind][0], clients, more)
        victim.kill()
        await clients.exact()
        if await value(fragile, "lb-0", counter) > before:
            return victim.name, asks
        await restart(fragile, victim.name)
        await known(fragile)
    raise AssertionError(f"{TRIES} times, nothing ran where it was killed")


@pytest.mark.parametrize(
    ("kind", "counter", "work"),
    [
        ("decode", "pinyon_lb_resumes_total", "pinyon_worker_generated_tokens_total"),
        ("prefill", "pinyon_lb_retries_total", "pinyon_worker_prefill_tokens_total"),
    ],
    ids=["decode", "prefill"],
)
async def test_an_instance_is_killed_while_it_works(fragile, clients, random_, kind, counter, work):
    victim, asks = await killed_at_work(fragile, clients, random_, kind, counter)
    clients.start(again(random_, asks))
    await clients.exact()
    await restart(fragile, victim)
    await known(fragile)
    await used(fragile, clients, random_, victim, work)
    await whole(fragile)


@KINDS
async def test_an_instance_is_frozen_and_wakes_up(fragile, clients, random_, kind):
    retries = await value(fragile, "lb-0", "pinyon_lb_retries_total")
    asks: list[Ask] = []

    async def begin() -> None:
        asks[:] = await begun(clients, random_, kind)

    victim = await busiest(fragile, kind, WORK[kind][0], clients, begin)
    with frozen(victim):
        # Its requests may have ended before the signal. Nobody knows of its end yet, so it gets more.
        clients.start(make_asks(random_, 5, 300, 4 if kind == "prefill" else 40))
        await clients.exact()
        assert await value(fragile, "lb-0", "pinyon_lb_retries_total") > retries, "nothing ran where it was frozen"
        # The memory that it was writing to belongs to other requests when it wakes up and continues.
        others = again(random_, asks, 40) + make_asks(random_, 2, 900, 40)
        await generating(clients.start(others), 5)
    await clients.exact()
    clients.start(again(random_, others))
    await clients.exact()
    await known(fragile)
    await whole(fragile)


async def test_the_conductor_is_killed_under_load(fragile, clients, random_):
    fallbacks = await value(fragile, "lb-0", "pinyon_lb_fallback_placements_total")
    asks = make_asks(random_, 4, 300, 80)
    await generating(clients.start(asks))
    fragile.services["conductor"].kill()
    clients.start(make_asks(random_, 4, 200, 20))
    await clients.exact()
    assert await value(fragile, "lb-0", "pinyon_lb_fallback_placements_total") > fallbacks

    await restart(fragile, "conductor")
    await known(fragile)
    await eventually(lambda: reads(fragile, "lb-0", "pinyon_lb_conductor_connected", 1), "it is connected")
    fallbacks = await value(fragile, "lb-0", "pinyon_lb_fallback_placements_total")
    # Nothing was computed since the conductor returned, so its knowledge comes from snapshots.
    for ask in asks:
        holders = await asyncio.to_thread(lookup, fragile, ask.prompt)
        assert any(name in WORKERS for name in holders), holders
        # workers report a block every 64 tokens
        assert max(holders.values()) == len(ask.prompt) // 64 * 64 // BLOCK_TOKENS
    answers = clients.start(again(random_, asks))
    await clients.exact()
    # On a busy machine computing anew may be sooner for a prompt, so only some reuse is required.
    assert any(answer.cached > 0 for answer in answers), [answer.cached for answer in answers]
    assert await value(fragile, "lb-0", "pinyon_lb_fallback_placements_total") == fallbacks
    await whole(fragile)


async def test_the_load_balancer_is_killed(fragile, clients, random_):
    """Every service gives up its requests, including those placed that never reached their instance."""
    await generating(clients.start(make_asks(random_, 4, 60, 400)))

    async def begin() -> None:
        clients.start(make_asks(random_, 30, 500, 400))

    await begin()
    await busiest(fragile, "prefill", "pinyon_worker_running_prefills", clients, begin)
    fragile.services["lb-0"].kill()
    await clients.end()
    await restart(fragile, "lb-0")
    await asyncio.to_thread(fragile.wait_serving, time.monotonic() + WAIT_S)
    await whole(fragile)
    clients.start(make_asks(random_, 4, 120, 20))
    await clients.exact()


async def test_redis_is_killed_and_comes_back_empty(fragile, clients, random_):
    asks = make_asks(random_, 6, 300, 30)
    await generating(clients.start(asks), 3)
    kill_redis(fragile)
    clients.start(make_asks(random_, 6, 300, 10))
    await clients.exact()
    await whole(fragile)  # also shows that nothing waits for a store that cannot be found

    start_redis(fragile)

    async def stores() -> bool:
        before = (await asyncio.to_thread(Scrape, fragile, WORKERS)).total("pinyon_worker_stored_blocks_total")
        clients.start(make_asks(random_, 2, 100, 2))
        await clients.exact()
        await wait_idle(fragile)  # by then the computed blocks have been offered to the store
        return (await asyncio.to_thread(Scrape, fragile, WORKERS)).total("pinyon_worker_stored_blocks_total") > before

    await eventually(stores, "blocks are stored again")
    clients.start(again(random_, asks))
    await clients.exact()
    await whole(fragile)


# -- processes that are told to end


async def test_the_load_balancer_drains(fragile, clients, random_):
    lb = fragile.services["lb-0"]
    assert await asyncio.to_thread(http_accepts, fragile)
    answers: list[Answer] = []
    while all(len(answer.tokens) == LONG for answer in answers):  # again, if everything has ended before the test looks
        answers = clients.start(make_asks(random_, 3, 120, LONG))
        await generating(answers)
    lb.signal(signal.SIGTERM)

    async def refused() -> bool:
        try:
            await send(clients.stub, make_asks(random_, 1, 20, 1)[0])
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        return False

    await eventually(refused, "new requests are refused")
    assert not await asyncio.to_thread(http_accepts, fragile)
    await clients.exact()
    assert await asyncio.to_thread(lb.wait, WAIT_S)
    assert exit_status(lb) == 0
    await restart(fragile, "lb-0")
    await asyncio.to_thread(fragile.wait_serving, time.monotonic() + WAIT_S)
    await whole(fragile)


@KINDS
async def test_a_worker_drains(fragile, clients, random_, kind):
    resumes = await value(fragile, "lb-0", "pinyon_lb_resumes_total")
    victim = await busiest(fragile, kind, WORK[kind][0], clients, lambda: begun(clients, random_, kind))
    victim.signal(signal.SIGTERM)
    clients.start(make_asks(random_, 4, 100, 10))
    await clients.exact()
    assert await asyncio.to_thread(victim.wait, WAIT_S)
    assert exit_status(victim) == 0
    assert await value(fragile, "lb-0", "pinyon_lb_resumes_total") == resumes, "a stream was cut instead of finished"
    await restart(fragile, victim.name)
    await known(fragile)
    await whole(fragile)


# -- everything at once

AWAY = ("kill", "kill", "freeze", "kill", "long freeze")
"""The faults of workers, in random order; the list below has those of the other services meanwhile."""
OTHERS = ("kvstore-0 kill", "kvstore-0 freeze", "redis kill", "redis freeze", "conductor kill", "conductor freeze")


def make_mix(random_: random.Random, count: int) -> list[Ask]:
    """Returns prompts that share beginnings."""
    documents = [text_tokens(random_, random_.randrange(100, 400)) for _ in range(6)]
    return [
        Ask(
            tuple(random_.choice(documents)[: random_.randrange(60, 400)] + text_tokens(random_, 5)),
            random_sampling(random_, random_.randrange(4, 40)),
        )
        for _ in range(count)
    ]


async def test_a_random_mix_of_faults(fragile, clients, random_, small_reference):
    asks = make_mix(random_, 40)
    ended: list[tuple[Ask, Answer]] = []
    errors: list[str] = []
    over = asyncio.Event()
    order = itertools.cycle(asks)

    async def client() -> None:
        while not over.is_set():
            ask, answer = next(order), Answer()
            try:
                async with asyncio.timeout(WAIT_S):
                    await send(clients.stub, ask, answer)
            except grpc.aio.AioRpcError as error:
                errors.append(clean(error))
            ended.append((ask, answer))
            await asyncio.sleep(THINK_S)

    async def disturb(faults: list[str]) -> None:
        for fault in random_.sample(faults, len(faults)):
            await inject(fragile, random_, fault)
            done = len(ended) + 6
            await eventually(lambda done=done: len(ended) >= done, f"requests end after {fault}")

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(client())
        lanes = [
            group.create_task(disturb([f"{random_.choice(WORKERS)} {away}" for away in AWAY])),
            group.create_task(disturb(list(OTHERS))),
        ]
        await asyncio.to_thread(small_reference.all_tokens, asks)
        await asyncio.wait(lanes)
        await eventually(lambda: len(ended) >= ENDED, "enough requests have ended")
        over.set()
    print(f"{len(ended)} requests, {len(errors)} errors: {sorted(set(errors))}")
    # The tokens received of a failed request must be right.
    wrong = [ask for ask, answer in ended if answer.tokens != small_reference.tokens(ask)[: len(answer.tokens)]]
    short = [ask for ask, answer in ended if len(answer.tokens) < ask.sampling.max_tokens]
    assert not wrong
    assert len(short) <= len(errors) <= 0.05 * len(ended)
    await asyncio.to_thread(fragile.wait_serving, time.monotonic() + WAIT_S)
    clients.start(again(random_, asks[:20]))
    await clients.exact()
    await whole(fragile)


def clean(error: grpc.aio.AioRpcError) -> str:
    """Returns the text of a typed error; any other error fails the test."""
    assert ERROR_METADATA_KEY in dict(error.trailing_metadata() or ()), error
    typed = error_from_rpc(error)
    assert typed.grpc_code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"), error
    return f"{typed.grpc_code}: {typed.message}"


async def inject(cluster: LocalCluster, random_: random.Random, fault: str) -> None:
    """Causes one fault for an arbitrary time, and repairs it."""
    name, _, what = fault.partition(" ")
    # Only the long freeze lasts until others notice, which takes 1.5 s.
    pause_s = 4.0 if what == "long freeze" else random_.uniform(0.1, 1.0)
    print(f"{fault} {pause_s:.2f} s")
    pace = Pace(dead_s=pause_s, frozen_s=pause_s)
    await strike(cluster, Balancer([]), name, what.removeprefix("long "), pace, lambda event: None)
