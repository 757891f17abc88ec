"""Thousands of invalid gRPC messages and HTTP requests, sent to every service of a live cluster.

Each gets a status that says whose fault it was. No service dies or grows, nothing is left, and the next request is
served as usual."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator

import grpc
import pytest

from launch.cluster import ClusterSpec, LocalCluster
from tests.chaos.memory import held_bytes
from tests.cluster.fault_tools import Clients, clients_of, instances_of, make_asks
from tests.cluster.hostile_messages import METHODS, Kept, Target, parses, payload
from tests.cluster.observe import wait_idle
from tests.cluster.reference import Reference
from tests.forks import forked
from tests.hostile_http import NEVER_ENDING, STATUSES, flood, fuzzed, send_fuzzed
from tests.http_client import Connection, Reply
from tests.long import usually

MODEL = "pinyon-tiny"
SEED = 20_261_122
MESSAGES = usually(2_000, long=5_000)
WARM_UP = 2_000
AT_ONCE = 24
REQUESTS = usually(2_400, long=10_000)
REQUESTS_WARM_UP = 2_000
CONNECTIONS = 100
SLOW = 20
FLOOD_BYTES = 6_000_000
CALL_S = 30.0
PATIENCE_S = 0.5
"""The load balancer's limit here for a head after its first byte; four times as much for that byte, and for a body."""
GROWTH_MAX = usually(107, long=110) / 100
"""The growth that is allowed; up to 4 % occurs when nothing is kept.

It amounts to 6 KiB kept for each message that a process gets, a fifth of all, or 2 KiB for each HTTP request that has a
handler."""

LOOKS = 3
"""Attempts, at most, to find that no process grew."""

STATUS_LOST = "Internal error from Core"
"""The text that grpc's client puts in place of the status when it still writes as the call ends."""
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
"""The statuses allowed for a message that can be parsed. UNKNOWN and INTERNAL are never among them."""


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    extra = {
        "conductor": ("--inflight-unclaimed-s", "3", "--ttft-slo-ms", "0"),
        # Limits the time that a message may claim for its put.
        "kvstore": ("--put-timeout-max-s", "3"),
        "lb": ("--head-timeout-s", f"{PATIENCE_S}", "--body-timeout-s", f"{4 * PATIENCE_S}"),
    }
    spec = ClusterSpec(prefill=1, decode=1, pool_blocks=128, extra=extra)
    with LocalCluster(spec, tmp_path_factory.mktemp("hostile-logs"), forked.with_small_model) as running:
        yield running


def memory_kib(pid: int) -> int:
    """Returns a process's memory without code, tables in huge pages, and the store's pool (shared, fills with KV)."""
    held = held_bytes(pid)
    return (held["Anonymous"] - held["asked_huge"]) // 1024


class Attacker:
    """A client that sends seeded messages, over one channel per process."""

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
        leaves = random_.random() < 0.1  # without waiting for the reply
        began_s = time.monotonic()
        code, details = await self._outcome(target, payloads, leaves)
        took_s = time.monotonic() - began_s
        self.codes[f"{target.process} {target.method.name} {code.name}"] += 1
        expected = CALLERS_FAULT
        if len(payloads) == 1 and not parses(target, payloads[0]) and not leaves:
            expected = {CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION}  # the role is checked before the message
        if details == STATUS_LOST and target.method.client_streaming:
            return
        if code not in expected or took_s >= CALL_S:
            sent = [raw[:300].hex() for raw in payloads]
            self.wrong.append(f"{target.process} {target.path}: {code.name} ({details}), {took_s:.1f} s, for {sent}")

    async def _outcome(self, target: Target, payloads: list[bytes], leaves: bool) -> tuple[grpc.StatusCode, str]:
        """Returns the status of one call that sends all payloads and waits for the end."""
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


class Siege:
    """A cluster whose memory is compared before and after, and which must serve all the time."""

    def __init__(self, cluster: LocalCluster, clients: Clients, random_: random.Random) -> None:
        self._cluster = cluster
        self._clients = clients
        self._random = random_
        self._before: dict[str, int] = {}

    async def warm_up(self) -> None:
        """Serves a prompt as long as the attacker's longest, and requests until every block of the pools was used."""
        for count, prompt_tokens in ((1, 1900), (4, 1000)):
            self._clients.start(make_asks(self._random, count, prompt_tokens, 8))
            await self._clients.exact()
        self._before = self._memory()

    async def begins(self) -> None:
        """Sets the baseline after the first messages; what an allocator released only briefly is no growth later."""
        await self._serves()
        self._before = {name: max(held, self._before[name]) for name, held in self._memory().items()}

    async def _serves(self) -> None:
        assert all(service.alive for service in self._cluster.services.values())
        self._clients.start(make_asks(self._random, 6, 100, 8))
        await self._clients.exact()
        await wait_idle(self._cluster)

    async def has_harmed_nobody(self, more: Callable[[], Awaitable[None]]) -> None:
        """Checks that no process grew. ``more`` sends more messages: allocators then release memory; a leak stays."""
        cluster, before = self._cluster, self._before
        grown = set(before)
        for _ in range(LOOKS):
            await self._serves()
            after = self._memory()
            print("\n".join(f"{name}: {before[name]} -> {after[name]} KiB" for name in sorted(before)))
            grown &= {name for name in before if after[name] > GROWTH_MAX * before[name]}
            if not grown:
                break
            await more()
        assert not grown, f"grown: {grown}"
        logs = {name: service.log_path.read_text(errors="replace") for name, service in cluster.services.items()}
        defects = {name for name, text in logs.items() if "Traceback" in text or "uncaught" in text}
        assert not defects, f"defects of ours in the logs of {defects}"

    def _memory(self) -> dict[str, int]:
        return {name: memory_kib(service.pid) for name, service in self._cluster.services.items()}


@pytest.fixture
async def clients(besieged: LocalCluster, small_reference: Reference) -> AsyncIterator[Clients]:
    async with clients_of(besieged, small_reference) as clients:
        yield clients


async def test_hostile_messages(besieged: LocalCluster, clients: Clients) -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    processes = {target.process for target in METHODS}
    channels = {name: grpc.aio.insecure_channel(besieged.services[name].endpoints["grpc"]) for name in processes}
    siege = Siege(besieged, clients, random_)
    await siege.warm_up()
    try:
        attacker = Attacker(besieged, channels, Kept(random_, instances_of(besieged)))
        await attacker.send(WARM_UP)
        await siege.begins()
        await attacker.send(MESSAGES)
        for line in sorted(attacker.codes):
            print(f"{attacker.codes[line]:6} {line}")
        assert not attacker.wrong, "\n".join(attacker.wrong)
        await siege.has_harmed_nobody(lambda: attacker.send(MESSAGES // 8))
    finally:
        for each in channels.values():
            await each.close()


class HttpAttacker:
    """A client with many fuzzed requests, while others send heads, trailers and bodies that never end, or drip."""

    def __init__(self, address: str, dice: random.Random) -> None:
        self._address = address
        self._dice = dice
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.cut = 0

    async def send(self, requests: int) -> None:
        left = iter(range(requests))

        async def fuzz() -> None:
            for _ in left:
                raw = fuzzed(self._dice, MODEL)
                for status in await send_fuzzed(self._address, raw, self._dice.random() < 0.5):
                    self._note(status, STATUSES, raw)

        async with asyncio.TaskGroup() as others:
            slow = [others.create_task(self._drip(NEVER_ENDING[number % 5][0])) for number in range(SLOW)]
            async with asyncio.TaskGroup() as group:
                for _ in range(CONNECTIONS):
                    group.create_task(fuzz())
                for begin, piece, status in NEVER_ENDING:
                    group.create_task(self._flood(begin, piece, {status, 408}))  # 408: too slow for the limit
                group.create_task(self._flood("", b"GET /health HTTP/1.1\r\nHost: lb\r\n\r\n" * 500, {200}))
            for task in slow:
                task.cancel()

    def _note(self, status: int, expected: Collection[int], raw: bytes) -> None:
        self.statuses[status] += 1
        if status not in expected:
            self.wrong.append(f"{status} for {raw[:300]!r}")

    async def _flood(self, begin: str, piece: bytes, expected: Collection[int]) -> None:
        began_s = time.monotonic()  # before the server can have seen the connection
        async with Connection(self._address) as connection:
            connection.writer.write(begin.encode("latin-1"))
            await flood(connection.reader, connection.writer, piece, FLOOD_BYTES)
            await self._answered(connection.reply(), expected, begin.encode("latin-1") + piece, began_s)

    async def _drip(self, begin: str) -> None:
        """Sends a byte now and then, again and again, which must extend no deadline."""
        while True:
            began_s = time.monotonic()
            async with Connection(self._address) as connection:
                connection.writer.write(begin[: len(begin) // 2].encode("latin-1"))
                reply = asyncio.ensure_future(connection.reply())
                for byte in begin[len(begin) // 2 :].encode("latin-1") * 20:
                    if (await asyncio.wait((reply,), timeout=0.05))[0]:
                        break
                    connection.writer.write(bytes((byte,)))
                await self._answered(reply, {400, 408, 414}, begin.encode("latin-1"), began_s)

    async def _answered(self, reply: Awaitable[Reply], expected: Collection[int], raw: bytes, began_s: float) -> None:
        try:
            self._note((await reply).status, expected, raw)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            # It sent for longer than the server listens, and the answer was lost with the connection. Or its first byte
            # was so late that the connection counted as idle.
            self.cut += 1
            if time.monotonic() - began_s < PATIENCE_S:
                self.wrong.append(f"{error!r} at once for {raw[:300]!r}")


async def test_hostile_http(besieged: LocalCluster, clients: Clients) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    attacker = HttpAttacker(besieged.services["lb-0"].endpoints["http"], dice)
    siege = Siege(besieged, clients, dice)
    await siege.warm_up()
    await attacker.send(REQUESTS_WARM_UP)
    await siege.begins()
    attacker.statuses.clear()
    await attacker.send(REQUESTS)
    print(f"statuses {dict(sorted(attacker.statuses.items()))}, and {attacker.cut} were cut")
    assert not attacker.wrong, "\n".join(attacker.wrong)
    assert attacker.statuses[400] > REQUESTS // 10
    assert attacker.statuses[200] > REQUESTS // 10
    assert attacker.statuses[408] > 0
    await siege.has_harmed_nobody(lambda: attacker.send(REQUESTS // 8))
