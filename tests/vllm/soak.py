"""A seeded soak: equal tokens while parts of the suite are killed and frozen, requests are aborted and preempted.

``python -m tests.vllm.soak --seconds 600 --seed 7`` runs it longer than the tests do."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from launch.cluster import ClusterSpec, LocalCluster
from launch.process import Process, await_ready
from launch.vllm import START_S, VllmServer
from tests.long import usually
from tests.vllm.ask import ask, ask_stream, counter, get, prompts
from tests.vllm.store_access import instance_of
from tests.waiting import wait_until

CALLERS = 8
TOKENS = 24
LATE_S = 5.0
"""The longest time for an answer, without the time in which something was frozen or had not started again."""
TINY_KV = ("--kv-cache-memory-bytes", str(96 * 65536), "--max-model-len", "2048")
"""KV memory for 96 blocks: a few requests at a time, so that some are preempted."""
FREEZE_S = 2.0
DRAIN_S = 60.0
long_only = pytest.mark.skipif(not usually(0, long=1), reason="it starts servers for minutes: ./dev test --long vllm")


@dataclass
class Count:
    """The counts of a soak."""

    equal: int = 0
    different: list[str] = field(default_factory=list)
    aborted: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    late: list[tuple[float, float, list[str]]] = field(default_factory=list)
    """Slow requests: their seconds, those without the faults meanwhile, and these faults."""
    longest_s: float = 0.0
    faults: list[tuple[str, float, float]] = field(default_factory=list)
    """The faults' names, with their beginnings and ends."""

    def beside(self, began_s: float, ended_s: float) -> tuple[float, list[str]]:
        """Returns for how long there was a fault between these times, and which ones there were.

        One fault is injected at a time."""
        met = [(name, max(began_s, first), min(ended_s, last)) for name, first, last in self.faults]
        met = [each for each in met if each[1] < each[2]]
        return sum(last - first for _, first, last in met), [name for name, _, _ in met]


class Soak:
    """Callers, and one thread that injects faults; all choices follow from the seed."""

    def __init__(
        self,
        urls: list[str],
        expected: dict[str, tuple[int, ...]],
        seed: int,
        aborts: float = 0.15,
        tokens: int = TOKENS,
        take_away: Callable[[Process], None] = lambda _: None,
    ) -> None:
        """Takes the function for faults of the kind "drain", such as :func:`drain`."""
        self._take_away = take_away
        self._urls, self._tokens = urls, tokens
        self._expected = expected
        self._rng = random.Random(seed)
        self._aborts = aborts
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._slow: list[tuple[float, float]] = []
        """The beginnings and ends of slow requests."""
        self.count = Count()

    def run(self, seconds: float, faults: list[tuple[str, Process]], restart_s: float) -> Count:
        """Runs for so long, with a fault about every two seconds to one of these processes (kind, process)."""
        callers = [threading.Thread(target=self._call, args=(self._rng.random(),)) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        end = time.monotonic() + seconds
        rng = random.Random(self._rng.random())
        try:
            while time.monotonic() < end:
                self._stop.wait(rng.uniform(1.0, 3.0))
                if faults and time.monotonic() < end:
                    kind, process = rng.choice(faults)
                    self._fault(kind, process, restart_s)
        finally:
            self._stop.set()
            for caller in callers:
                caller.join()
        for began_s, ended_s in self._slow:
            faulty_s, names = self.count.beside(began_s, ended_s)
            self.count.late.append((ended_s - began_s, ended_s - began_s - faulty_s, names))
        return self.count

    def _fault(self, kind: str, process: Process, restart_s: float) -> None:
        began_s = time.monotonic()
        self._inject(kind, process, restart_s)
        self.count.faults.append((f"{kind} {process.name}", began_s, time.monotonic()))

    def _inject(self, kind: str, process: Process, restart_s: float) -> None:
        if kind == "freeze":
            process.signal(signal.SIGSTOP)
            self._stop.wait(FREEZE_S)
            process.signal(signal.SIGCONT)
            return
        if kind == "drain":
            self._take_away(process)
        else:
            process.kill()
        self._stop.wait(0.5)
        process.start_again()
        end = time.monotonic() + restart_s
        while not process.announced():
            assert time.monotonic() < end, f"{process.name} does not come back{process.log_tail()}"
            time.sleep(0.05)

    def _call(self, seed: float) -> None:
        rng = random.Random(seed)
        known = list(self._expected)
        while not self._stop.is_set():
            prompt, url = rng.choice(known), rng.choice(self._urls)
            if rng.random() < self._aborts:
                self._abort(url, prompt, rng)
                continue
            began_s = time.monotonic()
            try:
                told = rng.choice((ask, ask_stream))(url, prompt, self._tokens)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                with self._lock:
                    self.count.errors[str(error)[:120] or type(error).__name__] += 1
                self._stop.wait(0.05)
                continue
            ended_s = time.monotonic()
            with self._lock:
                self.count.longest_s = max(self.count.longest_s, ended_s - began_s)
                if ended_s - began_s > LATE_S:
                    self._slow.append((began_s, ended_s))
                if told.tokens == self._expected[prompt]:
                    self.count.equal += 1
                else:
                    self.count.different.append(prompt)

    def _abort(self, url: str, prompt: str, rng: random.Random) -> None:
        """Begins a request, and leaves at a random moment."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=rng.uniform(0.001, 0.6))
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            connection.getresponse().read(rng.randrange(1, 2000))
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        with self._lock:
            self.count.aborted += 1


def small_cluster(model: str, *, apart: bool = False) -> ClusterSpec:
    """Returns a cluster of servers with little memory; ``apart``: with a server for prompts, which gets all that it
    can."""
    more: dict[str, Any] = {"prefill": 1, "decode": 2, "mixed": 0, "placement": "pinyon:decodes=1000"} if apart else {}
    return ClusterSpec(
        **{"prefill": 0, "decode": 0, "mixed": 2, **more}, engine="vllm", model=model, store_mib=64,
        extra={"vllm": TINY_KV},
    )  # fmt: skip


def set_draining(cluster: LocalCluster, name: str, draining: bool = True) -> None:
    """Tells a server, as people do, that it gets no new requests, or gets them again."""
    address = instance_of(cluster, name).address
    command = [sys.executable, "-m", "pinyon.cli", "admin", "worker", address, f"draining={str(draining).lower()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def drain(cluster: LocalCluster, server: Process) -> None:
    """Ends a server as an operator does: it gets nothing new, and is told to end when it has nothing left."""
    assert isinstance(server, VllmServer)
    assert server.process is not None
    set_draining(cluster, server.name)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    empty = lambda: not sum(counter(server.url, name) for name in names)  # noqa: E731
    wait_until(empty, f"{server.name} is empty", poll_s=0.05)
    server.signal(signal.SIGTERM)
    server.process.wait(DRAIN_S)


def expected_answers(server: VllmServer, count: int, seed: int) -> dict[str, tuple[int, ...]]:
    """Returns what a server that knows nothing of the suite answers to each prompt."""
    return {prompt: ask(server.url, prompt, TOKENS).tokens for prompt in prompts(seed, count)}


def nothing_is_held(server: VllmServer) -> bool:
    """Returns whether all of vLLM's blocks are free."""
    return counter(server.url, "vllm:kv_cache_usage_perc") == 0.0


def pool_is_idle(cluster: LocalCluster) -> bool:
    """Returns whether no store node has a lease, a put or a key open."""
    names = ("leases", "leased_objects", "open_puts", "reserved_objects", "writer_keys", "reader_keys")
    for store in cluster.of_kind("kvstore"):
        page = get(f"http://{store.endpoints['metrics']}", "/metrics")
        for name in names:
            if f"\npinyon_kvstore_{name} 0.0" not in page:
                return False
    return True


def at_rest(cluster: LocalCluster, servers: list[VllmServer]) -> None:
    """Waits until nothing is held anywhere."""
    for server in servers:
        wait_until(lambda server=server: nothing_is_held(server), f"all blocks of {server.name} are free", poll_s=0.1)
    wait_until(lambda: pool_is_idle(cluster), "the pool is idle", poll_s=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--direct", action="store_true", help="ask the servers, not the load balancer")
    parser.add_argument("--apart", action="store_true", help="one server for prompts and two that decode")
    parser.add_argument("--spare", action="store_true", help="kill no server of vLLM, which takes a minute to start")
    arguments = parser.parse_args()
    from launch import vllm
    from launch.ports import HeldPorts

    model = vllm.small_checkpoint()
    with HeldPorts() as ports:
        alone = VllmServer("alone", model, "tiny", "127.0.0.1", ports.take("127.0.0.1"), None, None)
        alone.log_path = vllm.FOLDER / "alone.log"
        alone.spawn()
        await_ready([alone], time.monotonic() + START_S)
        expected = expected_answers(alone, arguments.prompts, arguments.seed)
        alone.kill()
    with LocalCluster(small_cluster(str(model), apart=arguments.apart)) as cluster:
        servers = [each for each in cluster.services.values() if isinstance(each, VllmServer)]
        urls = [server.url for server in servers] if arguments.direct else [cluster.http]
        faults: list[tuple[str, Process]] = [
            (kind, process)
            for process in (*cluster.of_kind("kvstore"), *cluster.of_kind("conductor"))
            for kind in ("kill", "freeze")
        ]
        faults += [("freeze", server) for server in servers]
        if not (arguments.direct or arguments.spare):
            faults += [("kill", servers[-1]), ("drain", servers[-1])]
        soak = Soak(urls, expected, arguments.seed, take_away=partial(drain, cluster))
        count = soak.run(arguments.seconds, faults, START_S)
        print(f"seed {arguments.seed}: {count.equal} equal, {len(count.different)} different, {count.aborted} aborted")
        hung = sum(without_s > LATE_S for _, without_s, _ in count.late)
        print(f"errors {dict(count.errors)}; longest {count.longest_s:.1f} s")
        print(f"over {LATE_S:g} s: {len(count.late)}, without the time of faults: {hung}")
        for seconds, without_s, meanwhile in count.late:
            print(f"  {seconds:.1f} s, {without_s:.1f} s without {', '.join(meanwhile) or 'any fault'}")
        print(f"faults {Counter(name for name, _, _ in count.faults)}")
        for server in servers:
            preempted = counter(server.url, "vllm:num_preemptions_total")
            hits = counter(server.url, "vllm:external_prefix_cache_hits_total")
            print(f"{server.name}: {preempted:g} preemptions, {hits:g} tokens loaded")
        at_rest(cluster, servers)
        print("nothing is held")


if __name__ == "__main__":
    main()
