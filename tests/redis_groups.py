"""Groups of real Redis servers on loopback: a Redis Cluster, and a master with a replica that Sentinels watch."""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import redis

from launch.ports import HeldPorts
from launch.redis_server import NoRedis, local_redis
from tests.waiting import WAIT_S

SLOTS = 16384
NODE_TIMEOUT_MS = 1000
"""The time after which a group replaces a server that does not answer."""


class RedisGroup(ExitStack):
    """Processes of one group. Leaving the context ends them."""

    def __init__(self) -> None:
        super().__init__()
        found = local_redis()
        if found is None:
            raise NoRedis("no redis-server")
        self._executable = found[0]
        self._ports = self.enter_context(HeldPorts())
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """The processes by port."""

    def port(self) -> int:
        return self._ports.take("127.0.0.1")

    def start(self, *arguments: str, config: str | None = None) -> int:
        """Starts a server on a free port; returns the port when it answers."""
        port = self.port()
        folder = self._folder / str(port)
        folder.mkdir()
        command = [self._executable]
        if config is not None:
            (folder / "own.conf").write_text(config)
            command.append(str(folder / "own.conf"))
        command += ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
        command += ["--repl-diskless-sync-delay", "0", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.processes[port] = process
        self.callback(self.kill, port)
        with client_at(port) as client:
            until(lambda: client.ping(), f"the server on {port} answers")
        return port

    def kill(self, port: int) -> None:
        process = self.processes[port]
        process.kill()
        process.wait(WAIT_S)


def client_at(port: int) -> redis.Redis:
    return redis.Redis(port=port, decode_responses=True)


def until(holds: object, what: str) -> None:
    """Asks every 20 ms, as Redis tells nobody, until the answer is true."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if holds():  # type: ignore[operator]
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class ClusterOfThree(RedisGroup):
    """A Redis Cluster of three masters, each with a replica if asked for."""

    def __init__(self, *, replicas: bool = False) -> None:
        super().__init__()
        self._bus: dict[int, int] = {}
        self.masters = [self._member() for _ in range(3)]
        self.replicas: list[int] = []
        share = -(-SLOTS // 3)
        for number, port in enumerate(self.masters):
            with client_at(port) as client:
                first = number * share
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, min(SLOTS, first + share) - 1)
        if replicas:
            self.replicas = [self._member() for _ in range(3)]
        self._meet()
        for master, replica in zip(self.masters, self.replicas, strict=False):
            with client_at(master) as at_master, client_at(replica) as client:
                name = at_master.execute_command("CLUSTER", "MYID")
                until(lambda client=client, name=name: client.execute_command("CLUSTER", "REPLICATE", name), "it knows")
                until(lambda client=client: client.info("replication")["master_link_status"] == "up", "it follows")
        for port in self.processes:
            with client_at(port) as client:
                until(lambda client=client: "cluster_state:ok" in _cluster_info(client), "the cluster is ready")
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.masters)

    def _member(self) -> int:
        bus = self.port()
        options = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-replica-validity-factor", "0"]
        port = self.start(*options, "--cluster-node-timeout", str(NODE_TIMEOUT_MS))
        self._bus[port] = bus
        return port

    def _meet(self) -> None:
        first = self.masters[0]
        with client_at(first) as client:
            for port in self.processes:
                if port != first:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, self._bus[port])
        for port in self.processes:
            with client_at(port) as client:
                known = f"cluster_known_nodes:{len(self.processes)}"
                until(lambda client=client, known=known: known in _cluster_info(client), "all know each other")


def _cluster_info(client: redis.Redis) -> str:
    return str(client.execute_command("CLUSTER", "INFO"))


class WatchedMaster(RedisGroup):
    """A master and a replica that three Sentinels watch."""

    def __init__(self) -> None:
        super().__init__()
        self.master = self.start()
        self.replica = self.start("--replicaof", "127.0.0.1", str(self.master))
        with client_at(self.replica) as client:
            until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        watched = (
            f"sentinel monitor pool 127.0.0.1 {self.master} 2\n"
            f"sentinel down-after-milliseconds pool {NODE_TIMEOUT_MS}\nsentinel failover-timeout pool 3000\n"
        )
        self.sentinels = [self.start("--sentinel", config=watched) for _ in range(3)]
        for port in self.sentinels:
            with client_at(port) as client:
                until(lambda client=client: _sees_all(client), "the Sentinels know each other")
        self.url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in self.sentinels) + "/pool/0"


def _sees_all(client: redis.Redis) -> bool:
    (said,) = client.sentinel_masters().values()
    return int(said["num-other-sentinels"]) == 2 and int(said["num-slaves"]) == 1
