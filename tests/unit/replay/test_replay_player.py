"""The report on a replay whose requests fail."""

from __future__ import annotations

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.eviction import NO_TRAITS
from pinyon_lab.replay import Player, ReplayPrompts, Sending, TokenRange
from pinyon_lab.replay.player import ERRORS_MAX, OTHERS
from pinyon_lab.simulator.workload import Arrival


class Balancer(lb_pb2_grpc.LbServiceServicer):
    """A load balancer that answers one token, and ends as its settings say."""

    def __init__(self, how: str) -> None:
        self.how, self.asked = how, 0

    async def Generate(self, request, context):
        self.asked += 1
        number = self.asked
        yield lb_pb2.GenerateResponse(tokens=[7])
        if self.how == "refused":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"number {number}")
        if self.how == "well":
            yield lb_pb2.GenerateResponse(usage=common_pb2.Usage(prompt_tokens=1, completion_tokens=1))


async def play(how: str, count: int, output_tokens: int = 1):
    server = grpc.aio.server()
    lb_pb2_grpc.add_LbServiceServicer_to_server(Balancer(how), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    arrivals = [Arrival(0.0, 8, output_tokens, (number,), NO_TRAITS) for number in range(count)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            prompts = ReplayPrompts(arrivals, 16, 1, TokenRange())
            return await Player(channel, arrivals, prompts, Sending(timeout_s=60.0)).run()
    finally:
        await server.stop(None)


@pytest.mark.parametrize("output_tokens", [1, 1 << 40])
async def test_all_is_well(output_tokens: int) -> None:
    replayed = await play("well", 3, output_tokens)
    assert (replayed.errors, {each.end for each in replayed.outcomes}) == ({}, {"finished"})


async def test_an_answer_without_its_end_is_an_error() -> None:
    replayed = await play("cut off", 3)
    assert {each.end for each in replayed.outcomes} == {"cut off"}
    assert list(replayed.errors.values()) == [3]


async def test_errors_are_counted_whatever_they_say() -> None:
    replayed = await play("refused", 3 * ERRORS_MAX)
    assert sum(replayed.errors.values()) == 3 * ERRORS_MAX
    assert replayed.errors[OTHERS] == 2 * ERRORS_MAX
