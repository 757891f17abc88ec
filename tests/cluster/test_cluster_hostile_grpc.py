"""5,000 gRPC messages that nobody should send, to every service of a live cluster: each gets a status that says whose
fault it was, nobody dies, nothing is left, and the next request is served as if nothing had been."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.lb.v1 import lb_pb2_grpc
from services.cluster import ClusterSpec, LocalCluster
from tests.cluster.fault_tools import WAIT_S, Clients, make_asks
from tests.cluster.hostile_messages import METHODS, Kept, Target, parses, payload
from tests.cluster.observe import wait_idle
from tests.cluster.reference import Reference
from tests.forks import forked

SEED = 20_261_122
MESSAGES = 5_000
WARM_UP = 2_000
AT_ONCE = 24
CALL_S = 30.0
GROWTH_MAX = 1.10

STATUS_LOST = "Internal error from Core"
"""What grpc's client puts in the place of the status when it still writes as the call ends."""
CODE = grpc.StatusCode
CALLERS_FAULT = {
    CODE.OK,
    CODE.INVALID_ARGUMENT,
    CODE.NOT_FOUND,
    CODE.FAILED_PRECONDITION,
    CODE.RESOURCE_EXHAUSTED,
    CODE.UNAVAILABLE,
    CODE.DEADLINE_EXCEEDED,
    CODE.CANCELLED,
}
"""What may come of a message that can be parsed. Never UNKNOWN or INTERNAL."""


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    extra = {"conductor": ("--inflight-unclaimed-s", "3", "--ttft-slo-ms", "0")}
    spec = ClusterSpec(prefill=1, decode=1, pool_blocks=128, extra=extra)
    with LocalCluster(spec, tmp_path_factory.mktemp("hostile-logs"), forked) as running:
        yield running


def memory_kib(pid: int) -> int:
    """What a process holds, less its code and the store's pool, which is shared memory and fills with KV."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


class Attacker:
    """Sends what a seed says, over one channel per process."""

    def __init__(self, cluster: LocalCluster, channels: dict[str, grpc.aio.Channel], kept: Kept) -> None:
        self.cluster = cluster
        self.kept = kept
        self.sent = 0
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._channels = channels

    async def send(self, messages: int) -> None:
        until = self.sent + messages

        async def one_after_the_other() -> None:
            while self.sent < until:
                await self._call(self.kept.random.choice(METHODS))

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))

    async def _call(self, target: Target) -> None:
        random_ = self.kept.random
        count = random_.randint(1, 6) if target.method.client_streaming else 1
        payloads = [payload(target, self.kept) for _ in range(count)]
        self.sent += count
        leaves = random_.random() < 0.1  # without waiting for what comes
        began_s = time.monotonic()
        code, details = await self._outcome(target, payloads, leaves)
        took_s = time.monotonic() - began_s
        self.codes[f"{target.process} {target.method.name} {code.name}"] += 1
        expected = CALLERS_FAULT
        if len(payloads) == 1 and not parses(target, payloads[0]) and not leaves:
            expected = {CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION}  # the role is looked at before a message is
        if details == STATUS_LOST and target.method.client_streaming:
            return
        if code not in expected or took_s >= CALL_S:
            sent = [raw[:300].hex() for raw in payloads]
            self.wrong.append(f"{target.process} {target.path}: {code.name} ({details}), {took_s:.1f} s, for {sent}")

    async def _outcome(self, target: Target, payloads: list[bytes], leaves: bool) -> tuple[grpc.StatusCode, str]:
        """The status of one call that sends all of it and waits for the end."""
        call = getattr(self._channels[target.process], target.kind)(target.path)(
            self._messages(payloads) if target.method.client_streaming else payloads[0], timeout=CALL_S
        )
        try:
            if target.method.server_streaming:
                async for _ in call:
                    if leaves:
                        call.cancel()
                        return CODE.CANCELLED, "by us"
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            return CODE.CANCELLED, "by us"
        return CODE.OK, ""

    async def _messages(self, payloads: list[bytes]) -> AsyncIterator[bytes]:
        for raw in payloads:
            yield raw


async def test_hostile_messages(besieged: LocalCluster, reference: Reference) -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    with grpc.insecure_channel(besieged.conductor) as channel:
        stub = conductor_pb2_grpc.ConductorServiceStub(channel)
        instances = stub.ListInstances(conductor_pb2.ListInstancesRequest(), timeout=WAIT_S).instances
    processes = {target.process for target in METHODS}
    channels = {name: grpc.aio.insecure_channel(besieged.services[name].endpoints["grpc"]) for name in processes}
    clients = Clients(lb_pb2_grpc.LbServiceStub(channels["lb-0"]), reference)
    try:
        # Once as long as any of the attacker's prompts, and until every block of the pools has been used.
        for count, prompt_tokens in ((2, 1900), (12, 1000)):
            clients.start(make_asks(random_, count, prompt_tokens, 8))
            await clients.exact()
        attacker = Attacker(besieged, channels, Kept(random_, instances))
        await attacker.send(WARM_UP)
        before = {name: memory_kib(besieged.services[name].pid) for name in processes}

        await attacker.send(MESSAGES)
        for line in sorted(attacker.codes):
            print(f"{attacker.codes[line]:6} {line}")
        assert not attacker.wrong, "\n".join(attacker.wrong)
        assert not besieged.dead()
        clients.start(make_asks(random_, 6, 100, 8))
        await clients.exact()
        await wait_idle(besieged)
        after = {name: memory_kib(besieged.services[name].pid) for name in processes}
        print("\n".join(f"{name}: {before[name]} -> {after[name]} KiB" for name in sorted(processes)))
        grown = {name for name in processes if after[name] > GROWTH_MAX * before[name]}
        assert not grown, f"grown: {grown}"
        logs = {name: service.log_path.read_text(errors="replace") for name, service in besieged.services.items()}
        defects = {name for name, text in logs.items() if "Traceback" in text}
        assert not defects, f"defects of ours in the logs of {defects}"
    finally:
        await clients.end()
        for each in channels.values():
            await each.close()
