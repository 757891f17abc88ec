"""Requests that have ended leave nothing for Python's cyclic collector: to search them it stops the event loop."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.integration.lb_harness import MODEL, running_lb, spin
from tests.integration.servers_parts import ServerInstance, running_servers
from tests.integration.upstream_parts import FakeServer, running_upstreams

COUNT = 8
WAYS = {
    "whole": ("/v1/completions", {"prompt": "hi"}, 200),
    "streamed": ("/v1/completions", {"prompt": "hi", "stream": True}, 200),
    "followed": ("/v1/completions", {"prompt": "hi", "stream": True, "temperature": 0}, 200),
    "unknown": ("/v1/completions", {"prompt": "hi", "model": "none"}, 404),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}, 200),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left() -> int:
    """Returns how many requests are still there, in the form of the door or in that of what serves them."""
    kinds = Counter(type(each).__name__ for each in gc.get_objects())
    return max(kinds["HttpCall"], kinds["Request"], kinds["Forward"], kinds["ServerRequest"])


async def leaves_nothing(bench, way: str) -> None:
    path, body, status = WAYS[way]
    for _ in range(COUNT):
        assert (await bench.post(path, {"model": MODEL, "max_tokens": 2, **body})).status == status
    await bench.idle()
    await spin(lambda: left() <= 1, 20)  # a connection may hold its last one


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_on_our_instances_leaves_no_cycle(way: str, no_collector: None) -> None:
    async with running_lb() as bench:
        await leaves_nothing(bench, way)


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_to_other_servers_leaves_no_cycle(way: str, no_collector: None) -> None:
    async with running_upstreams(FakeServer(models=(MODEL,))) as bench:
        await leaves_nothing(bench, way)


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_to_instances_servers_leaves_no_cycle(way: str, no_collector: None) -> None:
    async with running_servers(ServerInstance("i0")) as bench:
        await leaves_nothing(bench, way)
