"""Long generations in pools that hold few of them: they block no other request and lose no token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from launch.cluster import LocalCluster
from pinyon.core.request import SamplingParams
from tests.cluster.fault_tools import Clients, clients_of, make_asks, value
from tests.cluster.observe import wait_idle
from tests.cluster.reference import Ask, Reference, text_tokens
from tests.cluster.specs import cluster_spec
from tests.forks import forked
from tests.waiting import WAIT_S, eventually

SEED = 51_000
LONG_TOKENS = 1200
POOL_BLOCKS = 84
"""Blocks for two long requests at their end, and a few more."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = cluster_spec(prefill=1, decode=1, pool_blocks=POOL_BLOCKS)
    with LocalCluster(spec, tmp_path_factory.mktemp("growth-logs"), forked.with_small_model) as running:
        yield running


@pytest.fixture
async def clients(small: LocalCluster, small_reference: Reference) -> AsyncIterator[Clients]:
    async with clients_of(small, small_reference) as clients:
        yield clients


async def test_long_streams_hold_up_nobody(small: LocalCluster, clients: Clients, small_reference: Reference) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    sampling = SamplingParams(max_tokens=LONG_TOKENS, ignore_eos=True)
    long = clients.start([Ask(tuple(text_tokens(dice, 30 + number)), sampling) for number in range(4)])
    await eventually(lambda: all(answer.tokens for answer in long), "all stream")
    others = Clients(clients.stub, small_reference)
    others.start(make_asks(dice, 40, 20, 4))
    had: list[int] = []
    for task in others.tasks:  # read when each answer arrives, not later
        task.add_done_callback(lambda _: had.append(max(len(answer.tokens) for answer in long)))
    # First of all: comparing computes in this process and would delay the answers.
    await asyncio.wait(others.tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    print(f"{had[:1]} tokens of the longest when the first short one was through")
    assert had, "no short one came through"
    assert had[0] < LONG_TOKENS, "the short ones waited for a long one"
    await others.exact()
    await clients.exact()
    assert await value(small, "decode-0", "pinyon_worker_preemptions_total") > 0
    assert await value(small, "decode-0", "pinyon_worker_room_wait_seconds_count") > 44
    await wait_idle(small)
