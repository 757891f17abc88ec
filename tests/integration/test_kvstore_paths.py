"""The way of KV between a store node or a worker and its clients: shared memory on one host, all NICs between two.

The nodes are processes, and the two hosts network namespaces with four NICs each."""

from __future__ import annotations

import contextlib
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.ports import HeldPorts
from launch.process import ServiceProcess
from launch.redis_server import RedisServer, embedded_redis_executable
from pinyon.core.request import SamplingParams
from pinyon.transfer import TransferEngine
from pinyon.transfer.transports.shm.cma import shm_available
from tests.integration.kvstore_parts import OBJECT, client_of
from tests.integration.transfer_hosts import HostProcess, Rails, carried, why_no_rails, why_no_shaping
from tests.integration.worker_parts import BLOCK_TOKENS, Fleet, peer_span
from tests.waiting import wait_until

NO_SHM = shm_available() or ""
shm = pytest.mark.skipif(bool(NO_SHM), reason=NO_SHM)
NO_RAILS = why_no_rails() or why_no_shaping()
rails = pytest.mark.skipif(bool(NO_RAILS), reason=NO_RAILS)

START_S = 60.0
MIB = 1 << 20
NICS = ("eth0", "eth1", "eth2", "eth3")
MANY = 32 * MIB // OBJECT


def moved(engine: TransferEngine) -> dict[str, int]:
    """Returns the bytes moved as initiator, by transport."""
    by_transport: dict[str, int] = {}
    for one in engine.stats().paths:
        by_transport[one.path.transport] = by_transport.get(one.path.transport, 0) + one.nbytes
    return by_transport


def scraped(service: ServiceProcess, metric: str) -> float:
    with urllib.request.urlopen(f"http://{service.endpoints['metrics']}/metrics", timeout=START_S) as reply:
        (line,) = [line for line in reply.read().decode().splitlines() if line.startswith(metric + " ")]
    return float(line.split()[1])


def until_scraped(service: ServiceProcess, metric: str, value: float) -> None:
    """Waits for a metric: a client may have the last byte before the server has counted it."""
    wait_until(lambda: scraped(service, metric) == value, f"{metric} is {value}")


@shm
async def test_on_one_host_the_store_is_used_by_shared_memory(
    redis_url: str, start_node: Callable[..., ServiceProcess]
) -> None:
    node = start_node()
    async with client_of(redis_url) as client:
        await client.stored(range(8))
        assert moved(client.engine) == {"shm": 8 * OBJECT}
        await client.until_listed(range(8))
        assert await client.get(range(8)) == [True] * 8
        assert moved(client.engine) == {"shm": 16 * OBJECT}
        # The node copies what is put, and takes no part in reads.
        until_scraped(node, "pinyon_transfer_served_written_bytes_total", 8 * OBJECT)
        assert scraped(node, "pinyon_transfer_served_read_bytes_total") == 0


async def test_who_is_told_to_use_tcp_uses_it(redis_url: str, start_node: Callable[..., ServiceProcess]) -> None:
    node = start_node()
    async with client_of(redis_url, transfer_transports="tcp") as client:
        await client.stored(range(8))
        await client.until_listed(range(8))
        assert await client.get(range(8)) == [True] * 8
        assert moved(client.engine) == {"tcp": 16 * OBJECT}
        until_scraped(node, "pinyon_transfer_served_written_bytes_total", 8 * OBJECT)
        until_scraped(node, "pinyon_transfer_served_read_bytes_total", 8 * OBJECT)


@shm
async def test_a_new_life_of_a_node_is_reached_by_shared_memory_too(
    redis_url: str, start_node: Callable[..., ServiceProcess], request: pytest.FixtureRequest
) -> None:
    ports = HeldPorts()
    request.addfinalizer(ports.close)
    where = [f"--{name}=127.0.0.1:{ports.take('127.0.0.1')}" for name in ("listen", "transfer-listen")]
    first = start_node(*where)
    async with client_of(redis_url) as client:
        await client.stored(range(4))
        first.kill()
        start_node(*where)
        client.forget_nodes()
        assert await client.get(range(4)) == [False] * 4
        await client.stored(range(4))
        await client.until_listed(range(4))
        assert await client.get(range(4)) == [True] * 4
        assert moved(client.engine) == {"shm": 12 * OBJECT}


@shm
async def test_on_one_host_workers_read_each_other_by_shared_memory(fleet: Fleet) -> None:
    """The source never pushed to the reader, which knows nothing of it but its answer to Acquire."""
    p, d = await fleet.pair()
    other = await fleet.start("prefill", "p1")
    client = await fleet.client(d)
    ask = (list(range(32, 32 + 10 * BLOCK_TOKENS + 3)), SamplingParams(max_tokens=2, ignore_eos=True))
    answer = await client.answer(*ask, prefill=p, decode=d)
    answer = await client.answer(*ask, prefill=other, decode=d, fetches=[peer_span(p, 0, 10)])
    assert answer.last.usage.cached_peer_tokens == 10 * BLOCK_TOKENS
    read = other.transfer.stats().read_bytes
    assert read == 10 * other.served.layout.block_bytes
    assert moved(other.transfer).keys() == {"shm"}


@pytest.fixture
def two_hosts(
    start_node: Callable[..., ServiceProcess], tmp_path: Path
) -> Iterator[tuple[ServiceProcess, HostProcess]]:
    """A store node (and Redis) on the far host, a store client on the near one, both with four NICs."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(contextlib.closing(Rails()))
        for rail in range(hosts.count):
            hosts.shape(rail, 60)  # so slow that each NIC has connected, and is needed
        near, far = hosts.names["near"], hosts.names["far"]
        url, nics = "redis://10.77.0.2:6379/0", ",".join(NICS)
        stack.callback(redis_inside(far, tmp_path / "redis.sock").kill)
        listen = ("--listen", "10.77.0.2:0", "--transfer-listen", "10.77.0.2:0", "--metrics-listen", "")
        node = start_node(*listen, "--allow-insecure", "--transfer-nics", nics, redis_url=url, netns=far)
        config = {"redis_url": url, "slots": MANY, "transfer_nics": nics}
        config |= {"transfer_listen": "10.77.0.1:0", "allow_insecure": "true"}
        client = HostProcess(config, near, "tests.integration.store_client_process")
        yield node, stack.enter_context(contextlib.closing(client))


def redis_inside(netns: str, door: Path) -> RedisServer:
    """Starts a Redis at 10.77.0.2:6379 of the namespace and waits for it. ``door`` is its Unix socket for the test."""
    executable = shutil.which("redis-server") or embedded_redis_executable()
    assert executable, "no redis-server"
    bind = ("--bind", "10.77.0.2", "--port", "6379", "--unixsocket", str(door), "--protected-mode", "no")
    command = ("ip", "netns", "exec", netns, executable, *bind, "--save", "", "--dir", str(door.parent))
    server = RedisServer(f"unix://{door}", "path", command)
    server.start()
    return server


@rails
@pytest.mark.slow
def test_between_two_hosts_the_store_is_used_over_all_nics(two_hosts: tuple[ServiceProcess, HostProcess]) -> None:
    node, client = two_hosts
    nbytes = MANY * OBJECT
    assert set(client.ask("put", count=MANY)["outcomes"]) == {"stored"}
    put = Shares(client, {}, {})
    put.are_all_used(nbytes)
    assert client.ask("get", count=MANY) == {"arrived": MANY}
    get = Shares(client, put.paths, put.wire)
    get.are_all_used(nbytes)
    assert client.ask("fetch", address=node.endpoints["grpc"], count=MANY) == {"arrived": MANY}
    Shares(client, get.paths, get.wire).are_all_used(nbytes)


class Shares:
    """The bytes of each path since an earlier look, by the engine's statistics and by the interfaces' counters."""

    def __init__(self, client: HostProcess, paths: dict[str, int], wire: dict[str, int]) -> None:
        self.paths: dict[str, int] = client.ask("paths")["bytes"]
        self.wire = carried(client.pid)
        self._by_path = {path: nbytes - paths.get(path, 0) for path, nbytes in self.paths.items()}
        self._by_nic = {nic: nbytes - wire.get(nic, 0) for nic, nbytes in self.wire.items()}

    def are_all_used(self, nbytes: int) -> None:
        print(self._by_path, self._by_nic)
        assert set(self._by_path) == {f"tcp {nic} {nic}" for nic in NICS}
        assert sum(self._by_path.values()) == nbytes
        assert min(self._by_path.values()) >= MIB
        assert min(self._by_nic.values()) >= MIB
